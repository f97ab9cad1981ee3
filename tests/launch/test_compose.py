"""launch/docker/compose.yaml: what its format takes, and its two services as processes on loopback addresses."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ring_cases import PPO, make_parts, settings

from megarl import __version__

FILE = Path(__file__).parents[2] / "launch/docker/compose.yaml"
TEXT, STRINGS = {"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string"}, "minItems": 1}
# Of https://github.com/compose-spec/compose-spec what the file uses; keys that begin with x- are its own.
SERVICE = {
    **dict.fromkeys(("image", "command", "working_dir", "network_mode", "ipc"), TEXT),
    **dict.fromkeys(("volumes", "secrets", "cap_drop", "security_opt", "devices"), STRINGS),
    "environment": {"type": "object", "additionalProperties": TEXT},
    "init": {"type": "boolean"},
    "stop_grace_period": {"type": "string", "pattern": r"^\d+s$"},
    "deploy": {"type": "object", "required": ["resources"]},
    "ulimits": {"type": "object", "additionalProperties": {"type": "integer"}},
}
SCHEMA = {
    "type": "object",
    "required": ["services"],
    "additionalProperties": False,
    "patternProperties": {"^x-": {}},
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"},
        "services": {
            "type": "object",
            "additionalProperties": {"type": "object", "additionalProperties": False, "properties": SERVICE},
        },
        "secrets": {
            "type": "object",
            "additionalProperties": {"type": "object", "additionalProperties": False, "properties": {"file": TEXT}},
        },
    },
}


def composed(text: str, **variables: str) -> dict[str, Any]:
    """The file with its variables, as Compose replaces them.  Raises KeyError for one that has to be set."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1], match[2] or ""
        return variables.get(name) or default[2:] if default.startswith(":-") else variables[name]

    found: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{(\w+)(:[-?][^}]*)?\}", value, text))
    return found


def test_its_keys_are_those_of_compose_with_and_without_the_lines_for_gpus() -> None:
    text = FILE.read_text()
    with_gpus = re.sub(r"^  # (deploy|devices|ulimits):", r"  \1:", text, flags=re.M)
    assert with_gpus.count("\n  #") == text.count("\n  #") - 3
    for each in (text, with_gpus):
        found = composed(each, FIRST="10.0.0.1", SECOND="10.0.0.2")
        jsonschema.validate(found, SCHEMA)
        assert set(found["services"]) == {"machine0", "machine1"}
        for number, service in enumerate(found["services"].values()):
            assert service["image"] == f"megarl-server:{__version__}"
            assert service["environment"] | {"RANK": str(number), "MASTER_ADDR": "10.0.0.1"} == service["environment"]
            assert set(service["secrets"]) <= set(found["secrets"]) and "privileged" not in service
            grace = int(re.findall(r"trainer\.term_grace_s=(\d+)", service["command"])[0])
            assert int(service["stop_grace_period"][:-1]) == grace + 60
    with pytest.raises(KeyError, match="FIRST"):
        composed(text)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(composed(text.replace("ipc:", "icp:"), FIRST="a", SECOND="b"), SCHEMA)


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_its_two_services_are_one_run(tmp_path: Path) -> None:
    parts, workspace, token = make_parts(tmp_path / "parts"), tmp_path / "workspace", tmp_path / "token"
    workspace.mkdir()
    token.write_text("the secret of this test")
    token.chmod(0o400)
    words = settings(parts, workspace, "one", *PPO, "trainer.n_gpus_per_node=1", "trainer.total_training_steps=2")
    found = composed(FILE.read_text(), FIRST="127.0.0.1", SECOND="127.0.0.2", WORDS=shlex.join(words))
    started = []
    for name, service in found["services"].items():
        program, *rest = shlex.split(service["command"])
        assert (program, service["working_dir"]) == ("megarl", "/workspace")
        assert service["environment"].pop("MEGARL_TOKEN_FILE") == "/run/secrets/token"
        environment = {**os.environ, **service["environment"], "MEGARL_TOKEN_FILE": str(token)}
        with (tmp_path / name).open("wb") as log:
            command = [sys.executable, "-m", program, *rest]
            started.append(subprocess.Popen(command, cwd=workspace, env=environment, stdout=log, stderr=log))
    try:
        ended = [process.wait(timeout=500) for process in started]
    finally:
        for process in started:
            process.kill()
    assert ended == [0, 0], "".join((tmp_path / name).read_text() for name in found["services"])
    summary = json.loads((workspace / "one/summary.json").read_text())
    assert summary["steps"] == 2 and summary["pushes"] == summary["pushes_verified"]
