"""The commands of benchmarks/: the README has each in its table, and each starts as a script from any folder."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
COMMANDS = sorted(FOLDER.glob("*/bench_*.py")) + sorted(FOLDER.glob("*/*_page.py"))
# Each in a process of its own, and what most of them import only once.
HELP = """
import os, runpy, sys
import megarl.group, megarl.mcore.models.model, transformers
for script in sys.argv[1:]:
    if os.fork() == 0:
        sys.argv, sys.path[0] = [script, "--help"], os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")
    if os.wait()[1]:
        sys.exit(f"{script} --help failed")
"""


def test_every_command_is_in_the_readme() -> None:
    named = re.findall(r"^\| `(\S+\.py)` \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(str(command.relative_to(FOLDER)) for command in COMMANDS)


@pytest.mark.full
def test_every_command_starts_as_a_script(tmp_path: Path) -> None:
    scripts = [str(command) for command in (*COMMANDS, FOLDER / "compare.py")]
    done = subprocess.run([sys.executable, "-c", HELP, *scripts], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
