"""launch/node.sh with RESTARTS: what is started again, and what is not; a script stands in for python."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
PYTHON = """#!/usr/bin/env bash
[ "$1" = -c ] && exit 0
echo "$*" >>starts
mapfile -t statuses <statuses
status=${statuses[$(wc -l <starts) - 1]}
if [ "$status" = hangs ]; then
    echo $$ >pid.part && mv pid.part pid
    exec sleep 600
fi
exit "$status"
"""


def start(folder: Path, statuses: list[str], restarts: int) -> subprocess.Popen[str]:
    """Of a copy of the scripts, which has no environment of its own beside it."""
    scripts, commands = folder / "launch", folder / "bin"
    scripts.mkdir()
    commands.mkdir()
    for name in ("node.sh", "activate.sh"):
        shutil.copy(LAUNCH / name, scripts)
    (commands / "python").write_text(PYTHON)
    (commands / "python").chmod(0o755)
    (folder / "statuses").write_text("\n".join(statuses))
    env = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "MEGARL_TOKEN": "the secret of these tests",
        "RESTARTS": str(restarts),
    }
    command = ["bash", str(scripts / "node.sh"), "2", "1", "127.0.0.1", "recipe=quickstart"]
    return subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("statuses", "starts", "status"),
    [
        (["1", "137", "0"], 3, 0),
        (["1", "1", "1", "1", "0"], 4, 1),
        (["2", "0"], 1, 2),
        (["130", "0"], 1, 130),
    ],
    ids=["failures, then done", "no more than so often", "a mistake in the settings", "somebody's Ctrl-C"],
)
def test_a_failure_starts_the_same_words_again(tmp_path: Path, statuses: list[str], starts: int, status: int) -> None:
    with start(tmp_path, statuses, restarts=3) as script:
        _, said = script.communicate(timeout=120)
    assert script.returncode == status, said
    words = (tmp_path / "starts").read_text().splitlines()
    wanted = "-m megarl train recipe=quickstart trainer.nnodes=2 trainer.node_rank=1 trainer.master_addr=127.0.0.1"
    assert words == [wanted] * starts
    assert said.count("starting again") == starts - 1


def test_signal_tree_a_save_is_the_runs_and_who_ends_the_script_ends_the_run(tmp_path: Path) -> None:
    with start(tmp_path, ["hangs", "0"], restarts=3) as script:
        while not (tmp_path / "pid").exists():
            assert script.poll() is None
            time.sleep(0.01)
        script.send_signal(signal.SIGUSR1)
        with pytest.raises(subprocess.TimeoutExpired):
            script.wait(0.3)
        script.send_signal(signal.SIGTERM)
        script.communicate(timeout=120)
    assert script.returncode == 143
    assert len((tmp_path / "starts").read_text().splitlines()) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
