"""The process of one server, with its log and a folder of its own: spawned, watched, ended together with its children.

A server is a session of its own: Ctrl-C reaches only the driver, which then stops the servers. It also ends when the
driver is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from megarl.rollout import ENGINES
from megarl.rollout.client import Engine, EngineError
from megarl.rollout.launch import TOKEN_VARIABLE, EngineLaunch, MakeCommand
from megarl.rollout.lifetime import last_lines

_POLL_S = 0.1
_STOP_S = 5.0
_QUESTION_S = 10.0


class ServerDied(RuntimeError):
    """A server ended, or does not serve; the message names its log and shows its last lines."""


class ServerProcess:
    """Example: server = ServerProcess(launch, token, Path("x.log"), name="server 0"); server.spawn(); ...; server.end()

    Spawn it from a thread that lives as long as the server shall: see `lifetime`.
    """

    def __init__(
        self, launch: EngineLaunch, token: str, log: Path, *, name: str, make_command: MakeCommand | None = None
    ) -> None:
        self.launch, self.log, self.name = launch, log, name
        self._make_command = make_command  # None: that of the launch's engine
        self.incarnation = 0  # counts the processes of this server
        self._token = token
        self._stop_signal = signal.SIGTERM
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: str | None = None
        self._log_start = 0  # bytes in the log before this incarnation

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def spawn(self) -> None:
        """Start the process; it does not serve yet. Raises ValueError for a launch that its engine cannot do."""
        assert not self.alive, f"{self.name} is running already"
        self._remove_folder()
        self._folder = tempfile.mkdtemp(prefix="megarl-server-")
        make = self._make_command or ENGINES[self.launch.engine]
        command = make(self.launch, Path(self._folder))
        self._stop_signal = command.stop_signal
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**command.environment, TOKEN_VARIABLE: self._token},
                start_new_session=True,
            )
        self.incarnation += 1

    def wait_until_serving(self, limit_s: float) -> None:
        """Return when the server says that it can serve; ServerDied when it ends, or the limit passes, before that."""
        self._wait_for(Engine.health, "did not serve", limit_s)

    def wait_for_answer(self, limit_s: float) -> None:
        """Return when the server answers a question that its scheduler must answer, which health is not in SGLang."""
        self._wait_for(Engine.server_info, "did not answer", limit_s)

    def _wait_for(self, question: Callable[[Engine], object], failing: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        engine = Engine(self.launch.url, self._token, timeout_s=min(_QUESTION_S, limit_s))
        with contextlib.closing(engine):
            while self.alive:
                try:
                    question(engine)
                    return
                except EngineError as error:
                    if time.monotonic() > deadline:
                        raise self.died(f"{failing} within {limit_s:g} s ({error.message})") from error
                time.sleep(_POLL_S)
        raise self.died()

    def died(self, how: str | None = None) -> ServerDied:
        """Why the server is of no use: `how`, or else how its process ended."""
        if how is None:
            code = None if self._process is None else self._process.poll()
            how = "was never started" if code is None else f"(pid {self.pid}) ended with exit code {code}"
        return ServerDied(f"{self.name} {how}; its log: {self.log}{self.last_words()}")

    def last_words(self) -> str:
        """The last lines that this incarnation logged."""
        return last_lines(self.log, self._log_start)

    def has_logged(self, words: str) -> bool:
        """Whether this incarnation's log holds these words, in whatever case."""
        return words.lower() in self.log.read_bytes()[self._log_start :].decode(errors="replace").lower()

    def ask_to_end(self) -> None:
        if self._process is not None and self.alive:
            self._process.send_signal(self._stop_signal)

    def end(self, grace_s: float = _STOP_S) -> None:
        """End the process, first asked and then, after `grace_s`, killed; and whatever it left behind."""
        if self._process is not None:
            self.ask_to_end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
            # Its own session: the group holds it and its children only, which may outlive it for a moment.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
