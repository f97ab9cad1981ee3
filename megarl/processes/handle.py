"""The one thing that the driver holds of what it started: servers or ranks, on this machine or another."""

from __future__ import annotations

from typing import Protocol


class ProcessHandle(Protocol):
    """A process; several that live and end together, as the ranks of one machine do, are one here."""

    @property
    def pid(self) -> int:
        """On its own machine, of the first where they are several; 0 where it is not ours."""

    def exit_code(self) -> int | None:
        """None while it runs.  Of several: as soon as one has failed, that one's."""

    def log_tail(self) -> str:
        """The end of its log, to be put behind a sentence; of several, of the one that ended."""

    def ask_to_end(self) -> None:
        """Returns at once, whether or not it does."""

    def end(self, grace_s: float) -> None:
        """End it, with whatever it left behind: by force where it has not ended by itself within `grace_s`.

        A second call does nothing.
        """
