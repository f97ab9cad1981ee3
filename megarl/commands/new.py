"""`megarl new FOLDER --task NAME`: writes a small project of a task, to be run and changed, without torch."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from megarl.tasks import TASKS
from megarl.terminal import sentences

# What a project has -> the file of megarl.tasks that it is a copy of.
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


def parse(words: list[str]) -> Request:
    """Raises ValueError, one sentence, for words that are no request."""
    folders: list[str] = []
    task: str | None = None
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option == "--task":
            task = value if equals else next(rest, "")
        elif word.startswith("-"):
            raise ValueError(f"there is no option {option}; expected --task NAME, --debug or --help")
        else:
            folders.append(word)
    if len(folders) != 1:
        raise ValueError(f"megarl new {' '.join(words)}: expected one folder and --task {'|'.join(TASKS)}")
    if task not in TASKS:
        given = "" if task is None else f" {task}"
        raise ValueError(f"megarl new --task{given}: expected --task with one of {', '.join(TASKS)}")
    return Request(Path(folders[0]), task)


def main(request: Request) -> int:
    """Write the project.  Raises ValueError for a folder that is there and not empty, and for a file in its place."""
    folder = request.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "the folder is not empty" if folder.is_dir() else "it is a file"
        raise ValueError(f"megarl new {folder}: {what}; expected a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"megarl new {folder}: {error.strerror}; expected a folder that can be made") from None
    source = files("megarl.tasks")
    for name, template in COPIES.items():
        text = source.joinpath(template.format(task=request.task)).read_text()
        (folder / name).write_text(text.replace("NAME_OF_THE_TASK", request.task))
    console = sentences()
    console.print(f"{folder}: {', '.join(COPIES)}")
    console.print(f"next: bash {folder / 'run.sh'}")
    return 0


def print_help(console: Console) -> None:
    """The page of `megarl new --help`."""
    console.print("[bold]megarl new[/] FOLDER --task NAME\n", highlight=False)
    for line in HELP:
        console.print(line, highlight=False, markup=False)


HELP = (
    "Writes a small project into the new folder FOLDER: a task that makes its own rows, a reward with a test, and the",
    "settings of two trainings on two CPU cores, a cold start and reinforcement learning. Change it into your own.",
    "",
    f"--task NAME   {', '.join(TASKS)}",
    "",
    "megarl new my_task --task spell_backward",
    "bash my_task/run.sh",
)
