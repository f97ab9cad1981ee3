"""`megarl new FOLDER --task NAME | --agent`: writes a small project, to be run and changed, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from megarl.io.terminal import sentences
from megarl.plugins.options import Options, folder

TASKS = ("addition", "counting", "sorting", "spell_backward")
# What a project has -> the file of megarl.commands.tasks that it is a copy of.
SHARED = {"cold_start.yaml": "project/cold_start.yaml", "run.sh": "project/run.sh"}
COPIES = {
    "task.py": "{task}.py",
    "reward.py": "reward.py",
    "test_task.py": "project/test_task.py.txt",
    "train.yaml": "project/train.yaml",
    "README.md": "project/README.md",
    **SHARED,
}
AGENT_COPIES = {
    "agent.py": "agent/agent.py",
    "task.py": "agent/task.py",
    "test_agent.py": "agent/test_agent.py.txt",
    "train.yaml": "agent/train.yaml",
    "README.md": "agent/README.md",
    **SHARED,
}


class Request(NamedTuple):
    folder: Path
    task: str | None = None
    agent: bool = False


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
    source, copies = files("megarl.commands.tasks"), AGENT_COPIES if request.agent else COPIES
    for name, template in copies.items():
        text = source.joinpath(template.format(task=request.task)).read_text()
        (target / name).write_text(text.replace("NAME_OF_THE_TASK", str(request.task)))
    console = sentences()
    console.print(f"{target}: {', '.join(copies)}")
    console.print(f"next: bash {target / 'run.sh'}")
    return 0


OPTIONS = Options(
    "new",
    """Writes a small project into a new folder: a task that makes its own rows, a reward or an agent, their test, and
the settings of two trainings on two CPU cores, a cold start and reinforcement learning. Change it into your own.""",
    ["megarl new my_task --task spell_backward", "bash my_task/run.sh", "megarl new my_agent --agent"],
)
OPTIONS.add_argument("folder", type=folder, help="a new folder")
KIND = OPTIONS.add_mutually_exclusive_group(required=True)
KIND.add_argument("--task", choices=TASKS, help="answers that a reward scores")
KIND.add_argument("--agent", action="store_true", help="an agent with tools, which learns to call them")
