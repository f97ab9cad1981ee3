"""Runs an agent in a process of its own: an ordinary function, or a program.

Each episode has a new process with a limit of memory, and in a process group of its own.  Its variables are those with
which the collector began, which has none of the run's secrets, and those of `surroundings`.
When the episode ends, for any reason, everything that it started is ended too.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import IO, Any

from megarl.agents.load import load_episode
from megarl.io.environment import start_fork_server
from megarl.io.job_signals import leave_to_driver
from megarl.plugins.load import describe, place_of
from megarl.rewards.result import RewardResult, to_result
from megarl.rewards.surroundings import Surroundings, end_children
from megarl.rollout.pool.slots import Slots
from megarl.samples.sample import Prompt, line_of

_END = signal.SIGUSR2  # from the collector; SIGTERM may come from elsewhere, and must not cut an episode
_GRACE_S = 3.0  # to end what an episode started, before its process is killed
_KEPT_BYTES = 4096  # the end of what a program printed
_SHOWN = 10  # episodes of a program of which this end is printed
_ROW_BYTES = 100_000  # of the row in MEGARL_ROW; Linux allows 128 KiB
_WORD = re.compile(r"\{\{(\w+)\}\}|(?<!\$)\{([A-Za-z_]\w*)\}")  # {{word}} stays {word}; ${word} is the shell's
# Where clients look for the name of a model that an agent does not say itself.
_MODEL_VARIABLES = """
OPENAI_MODEL OPENAI_DEFAULT_MODEL ANTHROPIC_MODEL ANTHROPIC_DEFAULT_OPUS_MODEL ANTHROPIC_DEFAULT_SONNET_MODEL
ANTHROPIC_DEFAULT_HAIKU_MODEL ANTHROPIC_SMALL_FAST_MODEL CLAUDE_CODE_SUBAGENT_MODEL
"""
_STATUS = ("status", "status_code", "code")  # where clients keep it
# And what their messages contain: the code and the words of OverLimit, the status as clients write it, or the words of
# Claude Code and Codex.
_SENTENCES = re.compile(
    r"context_length_exceeded|prompt is too long: the "
    r"|\b(?:Error code: 400|HTTP Error 400: |returned error: 400|400, message=|400 Client Error: )"
    r"|Client error '400 |Prompt is too long$|Codex ran out of room in the model's context window"
)


class EpisodeFailed(Exception):
    """An episode in a process has no result; one sentence.  `refused`: see is_refusal."""

    def __init__(self, sentence: str, *, refused: bool = False) -> None:
        super().__init__(sentence)
        self.refused = refused


@dataclass(frozen=True)
class AgentProgram:
    """What a process runs: the function of agent.fn, or the program of agent.command."""

    fn: str | None
    command: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def run(self, prompt: Prompt, base_url: str, api_key: str, model: str, *, is_shown: bool = False) -> Any:
        """Run it; returns what the function returns, None for a program, whose output is printed if it `is_shown`.

        Raises what the function raises.
        """
        if self.fn is not None:
            return load_episode(self.fn, self.arguments).call(base_url=base_url, api_key=api_key, prompt=prompt)
        text = text_of(prompt)
        fields = {"ground_truth": prompt.ground_truth, "data_source": prompt.data_source, "uid": prompt.uid}
        row = json.dumps({**prompt.extra, **fields, "prompt": prompt.text}, ensure_ascii=False, default=str)
        values = {**prompt.extra, **fields, "prompt": text}
        values |= {"base_url": base_url, "api_key": api_key, "model": model}
        environment = {"MEGARL_ROW": row} if len(row.encode()) <= _ROW_BYTES else {}
        words = [filled(word, values) for word in self.command]
        return _run_program(words, text, environment, f"episode {prompt.uid}" if is_shown else None)


class Processes:
    """Example:

        processes = Processes(program, num=16)
        async with processes.slot():
            result = await processes.run(prompt, url, key, model="policy")

    At most `num` run at a time: hold `slot`.  `surroundings`: limits and further variables of a process.
    """

    def __init__(self, program: AgentProgram, *, num: int, surroundings: Surroundings | None = None) -> None:
        self._program, self._surroundings = program, surroundings or Surroundings()
        self._slots, self._num_begun = Slots(num), 0
        self._context = multiprocessing.get_context("forkserver")  # this process has threads

    @asynccontextmanager
    async def slot(self, *, urgent: bool = False) -> AsyncIterator[None]:
        """Waits until one more may run; urgent callers come first."""
        await self._slots.take(urgent=urgent)
        try:
            yield
        finally:
            self._slots.give_back()

    async def run(self, prompt: Prompt, url: str, key: str, *, model: str) -> RewardResult | None:
        """The result of an episode at the endpoint `url`; None if it returned none.

        Raises EpisodeFailed.  Cancel it to end the episode; when it returns or raises, no process of it is left.
        """
        ours, theirs = self._context.Pipe(duplex=False)
        environment = {**self._surroundings.environment, **variables(url, key, model)}
        surroundings = replace(self._surroundings, environment=environment)
        self._num_begun += 1
        is_shown = self._num_begun <= _SHOWN
        arguments = (theirs, self._program, prompt, (url + "/v1", key, model), surroundings, is_shown)
        process = self._context.Process(target=_main, args=arguments, name=f"episode {prompt.uid}")
        starting = asyncio.ensure_future(asyncio.to_thread(_start, process))  # it may wait for the fork server
        try:
            await asyncio.shield(starting)
            theirs.close()
            await _readable(ours, process.sentinel)
            try:
                if not ours.poll():  # what it left behind may hold the other end
                    raise EOFError
                outcome = json.loads(ours.recv_bytes())
            except EOFError:
                await _readable(process.sentinel)
                process.join()
                raise EpisodeFailed(f"its process died with exit code {process.exitcode}") from None
        finally:
            await asyncio.wait([starting])  # nothing else would end it
            theirs.close()
            ours.close()
            if process.pid is not None:
                await _end(process)
        if "error" in outcome:
            raise EpisodeFailed(outcome["error"], refused=outcome["refused"])
        return RewardResult(outcome["reward"], outcome["extra"]) if "reward" in outcome else None


def variables(url: str, key: str, model: str) -> dict[str, str]:
    """Where OpenAI's and Anthropic's clients look for their service, its key and the model's name."""
    return {
        **dict.fromkeys(_MODEL_VARIABLES.split(), model),
        "OPENAI_BASE_URL": url + "/v1",
        "OPENAI_API_BASE": url + "/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        **past_proxies(),
    }


def past_proxies() -> dict[str, str]:
    """Variables that keep clients from asking a proxy, which this machine may have, for an address of the machine."""
    known = [os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy")]
    hosts = dict.fromkeys([*",".join(filter(None, known)).split(","), "127.0.0.1", "localhost"])
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(filter(None, hosts)))


def fields_of(command: Sequence[str]) -> set[str]:
    """The fields of a row that words of agent.command name in braces."""
    named = {match[2] for word in command for match in _WORD.finditer(word) if match[2]}
    return named - {"prompt", "uid", "ground_truth", "data_source", "base_url", "api_key", "model"}


def text_of(prompt: Prompt) -> str:
    """The prompt as text: of a single message its content, of several "role: content" lines."""
    if isinstance(prompt.text, str):
        return prompt.text
    if len(prompt.text) == 1:
        return str(prompt.text[0]["content"])
    return "\n".join(map(line_of, prompt.text))


def is_end(error: BaseException) -> bool:
    """Whether it is that of sys.exit() or sys.exit(0), by which programs end well."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def is_refusal(error: BaseException) -> bool:
    """Whether this is the error of a request that was refused, or was raised `from` one: no fault behind it.

    Clients have errors of their own, and what is in another process, or a program's last words, is text alone.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_refusal, error.exceptions))
    is_one = any(getattr(error, name, None) == 400 for name in _STATUS) or _SENTENCES.search(str(error)) is not None
    return is_one or (error.__cause__ is not None and is_refusal(error.__cause__))


# ---- in the process of the collector


def _start(process: ForkServerProcess) -> None:
    start_fork_server("__main__", __name__)  # a collector has done so, with the variables of its beginning
    process.start()


async def _readable(*what: Connection | int) -> None:
    """Wait until one of the descriptors can be read."""
    loop, found = asyncio.get_running_loop(), asyncio.Event()
    descriptors = [each if isinstance(each, int) else each.fileno() for each in what]
    for descriptor in descriptors:
        loop.add_reader(descriptor, found.set)
    try:
        await found.wait()
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)


async def _end(process: ForkServerProcess) -> None:
    """A process ends what it started and then itself; a guard does it for one that has to be killed."""
    try:
        if process.is_alive():
            assert process.pid is not None, "it was started"
            with suppress(ProcessLookupError):
                os.kill(process.pid, _END)
        async with asyncio.timeout(_GRACE_S):
            await _readable(process.sentinel)
    except TimeoutError:
        process.kill()
        await _readable(process.sentinel)
    except asyncio.CancelledError:
        process.kill()
        raise
    finally:
        process.join(_GRACE_S)
        process.close()


# ---- in the process of the episode


class _EndedByCollector(BaseException):
    """The collector ends the episode.  Not an Exception, so that an agent that catches those ends too."""


def _main(
    connection: Connection,
    program: AgentProgram,
    prompt: Prompt,
    where: tuple[str, str, str],
    surroundings: Surroundings,
    is_shown: bool = False,
) -> None:
    outcome, code = b"", 0
    try:
        try:
            signal.signal(_END, _on_end)
            os.environ.update(surroundings.environment)
            surroundings.set_up()
            leave_to_driver(runs_users_code=True)
            outcome = json.dumps(_outcome(program, prompt, where, is_shown)).encode()
        finally:  # also if the signal comes just now: after this line no signal can keep the children
            signal.signal(_END, signal.SIG_IGN)
    except _EndedByCollector as end:
        if place := place_of(end):
            print(f"episode {prompt.uid}: here the collector ended it{place}", file=sys.stderr, flush=True)
    except Exception:
        traceback.print_exc()
        code = 1
    try:
        if outcome:
            connection.send_bytes(outcome)
    finally:
        end_children()
        os._exit(code)  # no thread of the agent keeps the process


def _outcome(program: AgentProgram, prompt: Prompt, where: tuple[str, str, str], is_shown: bool) -> dict[str, Any]:
    try:
        value = program.run(prompt, *where, is_shown=is_shown)
        return {} if value is None else vars(to_result(value))
    except _EndedByCollector:
        raise
    except BaseException as error:
        if is_end(error):
            return {}
        sentence = str(error) if isinstance(error, EpisodeFailed) else describe(error)
        return {"error": sentence, "refused": is_refusal(error)}


def _on_end(*_: object) -> None:
    signal.signal(_END, signal.SIG_IGN)
    raise _EndedByCollector


def filled(word: str, values: Mapping[str, Any]) -> str:
    """{name} of each of `values` is replaced, in one pass, so that braces in a prompt stay.

    Values that are no text become JSON, None nothing.  Raises EpisodeFailed for another name.
    """

    def fill(match: re.Match[str]) -> str:
        kept, name = match.groups()
        if kept is not None:
            return f"{{{kept}}}"
        if name not in values:
            known = ", ".join(values)
            raise EpisodeFailed(
                f"agent.command has {{{name}}}: expected one of {known}, or {{{{{name}}}}} for {{{name}}}"
            )
        value = "" if values[name] is None else values[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    return _WORD.sub(fill, word)


def _run_program(words: Sequence[str], text: str, environment: Mapping[str, str], shown_as: str | None) -> None:
    """Run a program with the prompt as its input; the end of what it says is printed under the name `shown_as`.

    Raises EpisodeFailed if it ends with another code than 0.
    """
    with tempfile.TemporaryFile() as given:
        given.write(text.encode())
        given.seek(0)
        try:
            own = {**os.environ, **environment}
            program = subprocess.Popen(words, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=own)
        except OSError as error:
            raise EpisodeFailed(f"{words[0]} cannot be started: {error.strerror}") from None
    assert program.stdout is not None, "it is a pipe"
    printed = bytearray()
    reader = threading.Thread(target=_keep_end, args=(program.stdout, printed), daemon=True)
    reader.start()
    code = program.wait()
    reader.join(1.0)  # something that it left behind may hold its output open
    said = printed.decode(errors="replace").strip()
    if shown_as is not None:
        print(f"--- {shown_as}: {Path(words[0]).name} ended with exit code {code}, and said\n{said}", flush=True)
    if code:
        lines = said.splitlines()
        last = f"; the last that it said: {lines[-1]}" if lines else ""
        raise EpisodeFailed(f"{Path(words[0]).name} ended with exit code {code}{last}")


def _keep_end(stream: IO[bytes], kept: bytearray) -> None:
    while some := os.read(stream.fileno(), 1 << 16):
        kept += some
        del kept[:-_KEPT_BYTES]
