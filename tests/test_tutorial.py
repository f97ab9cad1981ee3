"""docs/tutorial.md, followed: its files are put into a project, and the tests that it tells to run pass.

Its `megarl` commands are composed in test_readme.py, and `run.sh` is run in tests/commands/test_new.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from readme_blocks import BOOK, blocks

from megarl.cli import main

FILES = {block.file: block.text for block in blocks(BOOK["tutorial.md"]) if block.file}


@pytest.mark.parametrize(
    ("written", "tried", "passed"),
    [(("reward.py", "test_reward.py"), "test_reward.py", 1), (("task.py",), "test_task.py", 5)],
)
def test_what_the_page_puts_into_a_project_passes_its_test(
    written: tuple[str, ...], tried: str, passed: int, tmp_path: Path
) -> None:
    assert main(["new", str(tmp_path / "mine"), "--task", "spell_backward"]) == 0
    for name in written:
        (tmp_path / "mine" / name).write_text(FILES[name])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tried]
    done = subprocess.run(command, cwd=tmp_path / "mine", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{passed} passed" in done.stdout


def test_the_page_puts_no_other_file_there() -> None:
    assert FILES.keys() == {"train.yaml", "reward.py", "test_reward.py", "task.py"}
