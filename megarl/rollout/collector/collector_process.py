"""The driver's handle on one collector: its process, and a thread for each direction of its pipe.

Neither thread blocks the driver, so that it notices a collector that has stopped, whatever is half-way in the pipe.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

from megarl.processes.lifetime import last_lines
from megarl.rollout.collector.collector import CollectorSettings, run_collector
from megarl.rollout.collector.messages import Close, Message, Outbox, sentence
from megarl.sandbox.environment import allowed_variables

_CLOSE_S = 5.0
_START_S = 600.0  # until the first sign of life: imports, tokenizer, reward workers
# multiprocessing starts programs with all variables of this process; those it then hides stay in /proc/PID/environ.
_PROGRAM = """
import sys
from multiprocessing import spawn
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
spawn.prepare(pipe.recv())
function, settings = pipe.recv()
function(pipe, settings)
"""
_DOUBT_S = 2.0  # a silent collector is looked at again after this time: perhaps this process was stopped, too


def _preparation() -> dict[str, Any]:
    """What multiprocessing tells its children: sys.path, and the main module, whose functions settings may hold."""
    found = spawn.get_preparation_data("collector")
    del found["authkey"]  # it goes to nobody but children of multiprocessing
    return found


class CollectorProcess:
    """A started collector.  Create it in a thread that lives as long as it: see `lifetime`.

    `on_messages(process, messages)` is called in a thread; an empty list is the last one: the collector has ended.
    """

    def __init__(
        self, settings: CollectorSettings, on_messages: Callable[[CollectorProcess, list[tuple[Any, ...]]], None]
    ) -> None:
        self.log_path, self._on_messages = settings.log_path, on_messages
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env=allowed_variables(),  # what else it needs, such as the servers' token, is in its settings
            pass_fds=[theirs.fileno()],
            # Ctrl-C, and a signal that a shell sends to the driver's group, reach only the driver: it may have to end
            # a step and save, and ends the collector then.
            start_new_session=True,
        )
        theirs.close()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: `_read_all` finds out
            self._pipe.send(_preparation())
            self._pipe.send((run_collector, settings))
        self._heard = time.monotonic()
        self._has_begun = False
        self._doubted = 0.0  # time.monotonic() when it was first found silent; 0: it is not
        self._outbox = Outbox(self._pipe, self._fail)
        threading.Thread(target=self._read_all, daemon=True, name="collector's messages").start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def put(self, message: Message) -> None:
        """Send a message; does not wait.  To a collector that has ended it goes nowhere."""
        self._outbox.put(message)

    def is_silent(self, limit_s: float) -> bool:
        """Whether nothing came from it for `limit_s`, or for ten minutes after its start."""
        now = time.monotonic()
        if now - self._heard <= (limit_s if self._has_begun else _START_S):
            self._doubted = 0.0
            return False
        self._doubted = self._doubted or now
        return now - self._doubted > _DOUBT_S

    def ask_to_end(self) -> None:
        self.put(Close())

    def end(self) -> None:
        """End it after `ask_to_end`, by signals if it does not end by itself."""
        self._end(lambda: None, self._process.terminate, self._process.kill)

    def kill(self) -> None:
        self._end(self._process.kill)

    def _end(self, *ways: Callable[[], None]) -> None:
        for end in ways:
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_S)
                break
        self._outbox.close()  # the pipe is closed with the last thread that uses it

    def how_it_ended(self) -> str:
        """A sentence, and the end of its log; for a collector that has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        return (
            f"the collector (pid {self.pid}) ended with exit code {self._process.returncode}; "
            f"its log: {self.log_path}{last_lines(self.log_path)}"
        )

    def _fail(self, error: Exception) -> None:
        """A message cannot be sent, read or understood: neither another one nor another collector would help."""
        self._on_messages(self, [("error", sentence(error))])

    def _read_all(self) -> None:
        try:
            while True:
                messages = self._pipe.recv()
                self._heard, self._has_begun = time.monotonic(), True
                if messages:
                    self._on_messages(self, messages)
        except (EOFError, OSError):  # it has ended, perhaps in the middle of a message
            self._on_messages(self, [])
        except Exception as error:
            self._fail(error)
