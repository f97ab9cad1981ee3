"""The driver's handle on a process that it started: a server or ranks, on this machine or another."""

from __future__ import annotations

from typing import Protocol


class ProcessHandle(Protocol):
    """A process, or several that start and end together, such as the ranks of a machine."""

    @property
    def pid(self) -> int:
        """Process id on its own machine; of the first process if there are several; 0 if we did not start it."""

    def exit_code(self) -> int | None:
        """None while it runs.  With several processes: the code of one that failed, as soon as one has failed."""

    def log_tail(self) -> str:
        """The end of its log, to append to an error; with several processes, the log of the one that ended."""

    def ask_to_end(self) -> None:
        """Ask it to end; returns at once."""

    def end(self, grace_s: float) -> None:
        """End it and all its child processes; by force if it has not ended within `grace_s`.

        A second call does nothing.
        """
