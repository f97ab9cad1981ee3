"""`agent.fn=verifiers:TASKSET`: tasks of the package `verifiers`, which runs in an environment of its own.

Its versions of openai and pydantic are not ours, so that a process with its Python (`launch/verifiers.sh` makes
.venv-verifiers) runs the episodes: it gets the endpoint's address and a task, and answers with the reward.  Each row of
data holds a task in the field `task`; `verifiers_worker.py --rows` writes such rows.
agent.args: `python`, its interpreter; all others are settings of the package's environment, such as `agent`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from megarl.plugins.load import describe
from megarl.samples.sample import Prompt

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


_LINE_BYTES = 1 << 26
_KEPT_BYTES = 4096  # the end of what the process said besides
_Waiting = dict[int, asyncio.Future[dict[str, Any]]]  # by the number of the request


class LineWorker:
    """The process, started with the first request and, should it end, with the next.

    Example: reply = await LineWorker("python", "worker.py").ask(task=7)
    A request has a number, `id`, and so has its reply; {"cancel": number} says that the caller has stopped waiting.
    """

    def __init__(self, *command: str) -> None:
        self._command = command
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: _Waiting = {}  # for this process

    async def ask(self, **request: Any) -> dict[str, Any]:
        """The reply.  Raises RuntimeError if the process ends or says something else."""
        stdin, number = await self._stdin(), next(self._numbers)
        waiting = self._waiting
        reply = waiting[number] = asyncio.get_running_loop().create_future()
        try:
            stdin.write(_line({"id": number, **request}))
            return await reply
        except asyncio.CancelledError:
            stdin.write(_line({"cancel": number}))
            raise
        finally:
            del waiting[number]

    async def _stdin(self) -> asyncio.StreamWriter:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                pipe = asyncio.subprocess.PIPE
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=pipe, stdout=pipe, stderr=pipe, limit=_LINE_BYTES
                )
                self._waiting = {}
                self._reading = asyncio.create_task(_read(self._process, self._waiting))
        assert self._process.stdin is not None, "its stdin is a pipe"
        return self._process.stdin


async def _read(process: asyncio.subprocess.Process, waiting: _Waiting) -> None:
    """Hand out its replies until it ends; one that says something else is ended."""
    assert process.stdout is not None and process.stderr is not None, "they are pipes"
    said = bytearray()
    passing = asyncio.create_task(_pass_on(process.stderr, said))
    try:
        while line := await process.stdout.readline():
            reply = json.loads(line)
            future = waiting.get(reply["id"])
            if future is not None and not future.done():  # else it was cancelled
                future.set_result(reply)
        end = f"ended with exit code {await process.wait()}"
        await asyncio.wait([passing], timeout=1.0)  # something that it left behind may hold it open
        if lines := said.decode(errors="replace").strip().splitlines():
            end += f"; the last that it said: {lines[-1]}"
    except Exception as error:
        process.kill()
        await process.wait()
        end = f"was ended, because it said something else than a reply: {describe(error)}"
    for future in waiting.values():
        if not future.done():
            future.set_exception(RuntimeError(f"the worker {end}"))


async def _pass_on(stream: asyncio.StreamReader, end: bytearray) -> None:
    """What the process says goes where we say it, and its end is kept."""
    while some := await stream.read(1 << 16):
        os.write(2, some)
        end += some
        del end[:-_KEPT_BYTES]


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
