"""`megarl new FOLDER --task NAME`: writes a small project of a task, to be run and changed, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from megarl.io.terminal import sentences
from megarl.plugins.options import Options, folder

TASKS = ("addition", "counting", "sorting", "spell_backward")
# What a project has -> the file of megarl.commands.tasks that it is a copy of.
COPIES = {
    "task.py": "{task}.py",
    "reward.py": "reward.py",
    "test_task.py": "project/test_task.py.txt",
    "cold_start.yaml": "project/cold_start.yaml",
    "train.yaml": "project/train.yaml",
    "run.sh": "project/run.sh",
    "README.md": "project/README.md",
}


class Request(NamedTuple):
    folder: Path
    task: str


def parse(words: Sequence[str]) -> Request:
    """Raises ValueError, one sentence, for words that are no request."""
    return Request(**OPTIONS.values(words))


def main(request: Request) -> int:
    """Write the project.  Raises ValueError for a folder that is there and not empty, and for a file in its place."""
    target = request.folder
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        what = "the folder is not empty" if target.is_dir() else "it is a file"
        raise ValueError(f"megarl new {target}: {what}; expected a new folder")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"megarl new {target}: {error.strerror}; expected a folder that can be made") from None
    source = files("megarl.commands.tasks")
    for name, template in COPIES.items():
        text = source.joinpath(template.format(task=request.task)).read_text()
        (target / name).write_text(text.replace("NAME_OF_THE_TASK", request.task))
    console = sentences()
    console.print(f"{target}: {', '.join(COPIES)}")
    console.print(f"next: bash {target / 'run.sh'}")
    return 0


OPTIONS = Options(
    "new",
    """Writes a small project into a new folder: a task that makes its own rows, a reward with a test, and the settings
of two trainings on two CPU cores, a cold start and reinforcement learning. Change it into your own.""",
    ["megarl new my_task --task spell_backward", "bash my_task/run.sh"],
)
OPTIONS.add_argument("folder", type=folder, help="a new folder")
OPTIONS.add_argument("--task", choices=TASKS, required=True)
