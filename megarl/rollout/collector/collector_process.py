"""The driver's handle on one collector: its process, and a thread for each direction of its pipe.

Neither thread blocks the driver, so that it notices a collector that has stopped, whatever is half-way in the pipe.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from megarl.processes.child import start_child
from megarl.processes.lifetime import last_lines
from megarl.rollout.collector.collector import CollectorSettings, run_collector
from megarl.rollout.collector.messages import Close, Message, Outbox, sentence

_CLOSE_S = 5.0
_START_S = 600.0  # until the first sign of life: imports, tokenizer, reward workers
_DOUBT_S = 2.0  # a silent collector is looked at again after this time: perhaps this process was stopped, too


class CollectorProcess:
    """A started collector.  Create it in a thread that lives as long as it: see `lifetime`.

    `on_messages(process, messages)` is called in a thread; an empty list is the last one: the collector has ended.
    """

    def __init__(
        self, settings: CollectorSettings, on_messages: Callable[[CollectorProcess, list[tuple[Any, ...]]], None]
    ) -> None:
        self.log_path, self._on_messages = settings.log_path, on_messages
        # The driver may have to end a step and save after Ctrl-C, and ends the collector then.
        self._process, self._pipe = start_child(run_collector, settings)
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
