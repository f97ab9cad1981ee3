"""The scripts of launch/, read by their checker, and by us."""

import os
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
SCRIPTS = sorted(LAUNCH.rglob("*.sh"))


def test_shellcheck_finds_nothing() -> None:
    command = ["shellcheck", "--external-sources", "--source-path=SCRIPTDIR", *SCRIPTS]
    found = subprocess.run(command, cwd=LAUNCH.parent, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_ends_only_what_it_started_and_shows_no_secret(script: Path) -> None:
    text = script.read_text()
    for word in ("pkill", "killall", "kill -9 -1", "ssh ", "sudo", "StrictHostKeyChecking", "--api-key", "0.0.0.0"):
        assert word not in text, word
    assert "MEGARL_TOKEN=$" not in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["2", "0"], "NODES NODE_RANK ADDRESS_OF_NODE_0"),
        (["2", "0", "127.0.0.1", "recipe=quickstart"], "umask 077; openssl rand -hex 32"),  # without a token
    ],
)
def test_one_that_is_told_too_little_says_what_it_wants(words: list[str], told: str) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("MEGARL_TOKEN")}
    found = subprocess.run(["bash", LAUNCH / "node.sh", *words], capture_output=True, text=True, env=env)
    assert found.returncode == 2
    assert told in found.stderr
