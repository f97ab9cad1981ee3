"""`agent.fn=verifiers:TASKSET`: tasks of the package `verifiers`, which runs in an environment of its own.

Its versions of openai and pydantic are not ours, so that a process with its Python (`launch/verifiers.sh` makes
.venv-verifiers) runs the episodes: it gets the endpoint's address and a task, and answers with the reward.  Each row of
data holds a task in the field `task`; `verifiers_worker.py --rows` writes such rows.
agent.args: `python`, its interpreter; all others are settings of the package's environment, such as `agent`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from megarl.agents.line_worker import LineWorker
from megarl.sample import Prompt

PYTHON = ".venv-verifiers/bin/python"
WORKER = Path(__file__).with_name("verifiers_worker.py")


def load(address: str, arguments: Mapping[str, Any]) -> Callable[[str, Prompt], Awaitable[Any]]:
    """Raises ValueError if there is no such interpreter."""
    settings = dict(arguments)
    python = Path(str(settings.pop("python", PYTHON))).absolute()
    if not os.access(python, os.X_OK):
        raise ValueError(f"agent.fn=verifiers:{address}: {python} is no Python; run `bash launch/verifiers.sh`")
    worker = LineWorker(str(python), "-P", str(WORKER), address, "--env", json.dumps(settings))

    async def episode(base_url: str, prompt: Prompt) -> dict[str, float]:
        if "task" not in prompt.extra:
            raise ValueError(f"prompt {prompt.uid} has no field `task`; expected a row of {WORKER.name} --rows")
        reply = await worker.ask(base_url=base_url, task=prompt.extra["task"])
        if "error" in reply:
            raise RuntimeError(f"verifiers: {reply['error']}")
        return {**reply["rewards"], "score": reply["reward"]}

    return episode
