"""`megarl new FOLDER --task NAME | --agent | --model NAME`: writes a small project, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from megarl.io.terminal import sentences
from megarl.plugins.options import Options, folder

TASKS = ("addition", "counting", "sorting", "spell_backward")
MODELS = {"smollm2": "sums"}  # a pretrained model -> the task that it half knows
# What a project has -> the file of megarl.commands.tasks that it is a copy of.
SHARED = {"cold_start.yaml": "project/cold_start.yaml", "run.sh": "project/run.sh"}
COPIES = {
    "task.py": "{task}.py",
    "reward.py": "reward.py",
    "test_reward.py": "project/test_reward.py.txt",
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
OF_A_MODEL = ("README.md", "dpo.yaml", "lora.yaml", "ppo.yaml", "reward.py", "run.sh", "task.py", "train.yaml")
MODEL_COPIES = {**{name: f"model/{name}" for name in OF_A_MODEL}, "test_task.py": "model/test_task.py.txt"}


class Request(NamedTuple):
    folder: Path
    task: str | None = None
    agent: bool = False
    model: str | None = None


def parse(words: Sequence[str]) -> Request:
    """Raises ValueError, one sentence, for words that are no request."""
    request = Request(**OPTIONS.values(words))
    if request.model:
        task = request.task or MODELS[request.model]
        if request.agent or task != MODELS[request.model]:
            what = "--agent" if request.agent else f"--task {task}"
            OPTIONS.error(
                f"{what} makes a tiny model of its own; expected --task {MODELS[request.model]} with --model "
                f"{request.model}, or no --model"
            )
        return request._replace(task=task)
    if request.task in MODELS.values():
        OPTIONS.error(
            f"--task {request.task} is one of a pretrained model; expected --model {', '.join(MODELS)} with it"
        )
    if not (request.agent or request.task):
        OPTIONS.error("one of the options --task --agent --model is required")
    return request


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
    copies = AGENT_COPIES if request.agent else MODEL_COPIES if request.model else COPIES
    source = files("megarl.commands.tasks")
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
the settings of trainings on two CPU cores: a cold start of a tiny model and reinforcement learning, or reinforcement
learning of a pretrained model of the package index. Change it into your own.""",
    [
        "megarl new my_task --task spell_backward",
        "bash my_task/run.sh",
        "megarl new my_agent --agent",
        "megarl new real --model smollm2",
    ],
)
OPTIONS.add_argument("folder", type=folder, help="a new folder")
KIND = OPTIONS.add_mutually_exclusive_group()
KIND.add_argument("--task", choices=(*TASKS, *MODELS.values()), help="answers that a reward scores")
KIND.add_argument("--agent", action="store_true", help="an agent with tools, which learns to call them")
OPTIONS.add_argument("--model", choices=tuple(MODELS), help="a pretrained model in place of a tiny one; its task: sums")
