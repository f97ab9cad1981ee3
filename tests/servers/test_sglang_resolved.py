"""The servers of every recipe and preset, as SGLang's own code resolves them on H100 and on B200; nothing is started."""

import json
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from preset_files import NAMES, cases_of
from tiny_server import CURRENT, OLD, ROOT, sglang_of
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES

from megarl.config import Config, config_dir, load_config
from megarl.config.placement import placements
from megarl.servers.launch import EngineLaunch
from megarl.servers.sglang import sglang_command
from megarl.trainer.build import server_launch

pytestmark = pytest.mark.sglang

SCRIPT = ROOT / "tests" / "helpers" / "resolved_server_args.py"
STAND_INS = ROOT / "megarl" / "servers" / "sglang_cpu"
RECIPES = sorted(path.stem for path in (config_dir() / "recipe").glob("*.yaml"))


@cache
def configs() -> dict[str, Config]:
    """Of every recipe and of every preset, but those of models so small that our own server has them.

    Of a preset's layouts that start the same servers, one is enough.
    """
    words = {name: [f"recipe={name}"] for name in RECIPES}
    seen = set()
    for case in (case for preset in NAMES for case in cases_of(preset)):
        rollout = {name: value for name, value in case.content.get("rollout", {}).items() if name != "num_servers"}
        servers = (case.preset, str(rollout), case.content["trainer"]["n_gpus_per_node"])
        if servers not in seen:
            words[" ".join(case.words)] = case.words
        seen.add(servers)
    on_gpus = ["data.train_files=[x]", "data.val_files=[x]", "trainer.device=cuda"]
    found = {name: load_config([*each, *on_gpus], command="train")[0] for name, each in words.items()}
    return {name: config for name, config in found.items() if config.model.config and config.rollout.engine != "hf"}


def launch_of(config: Config, folder: Path, python: str) -> EngineLaunch:
    """The first server; of one over several machines, what its second machine starts."""
    hf = dict(config.model.config)
    hf["architectures"] = [ARCHITECTURES.get(hf["model_type"], "DeepseekV3ForCausalLM")]  # kimi_k2 has the same class
    (folder / "config.json").write_text(json.dumps(hf))
    (machines, gpu), *_ = placements(config, trains=True)
    launch = server_launch(replace(config, model=replace(config.model, path=str(folder))))
    launch = replace(launch, engine="sglang", port=5, group_port=6, python=python, first_gpu=gpu, reads_weights=False)
    if len(machines) == 1:
        return launch
    return replace(launch, num_machines=len(machines), machine=1, meeting_host="10.0.0.1")


@pytest.fixture(scope="module", params=[CURRENT, pytest.param(OLD, marks=pytest.mark.long)])
def python(request: pytest.FixtureRequest) -> str:
    return sglang_of(request.param)


@pytest.fixture(scope="module", params=["H100", "B200"])
def resolved(request: pytest.FixtureRequest, python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What SGLang makes of each; one process for all, because its imports take most of the time."""
    root, cases, environment = tmp_path_factory.mktemp("resolved"), [], {}
    for number, config in enumerate(configs().values()):
        folder = root / str(number)
        folder.mkdir()
        command = sglang_command(launch_of(config, folder, python), folder)
        environment = command.environment | {"PYTHONPATH": f"{command.environment['PYTHONPATH']}:{STAND_INS}"}
        variables = {name: value for name, value in command.environment.items() if name.startswith(("SGLANG_", "NCCL_"))}
        cases.append({"argv": command.argv[4:], "environment": variables, "builds": True})
    words = [python, str(SCRIPT), request.param]
    done = subprocess.run(words, input=json.dumps(cases), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(configs(), map(json.loads, done.stdout.splitlines()), strict=True))


def test_every_recipe_and_preset_has_servers_that_start_as_resolved(resolved: dict[str, Any]) -> None:
    failed = {name: answer["error"].splitlines()[-1] for name, answer in resolved.items() if "error" in answer}
    assert not failed
    for name, answer in resolved.items():
        print(name, answer["built"], answer["args"]["moe_runner_backend"], answer["args"]["attention_backend"])
