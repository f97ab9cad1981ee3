"""What comes back from a program that ran."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """Example: Result("3\\n", "", 0, 0.03, "")."""

    stdout: str
    stderr: str
    status: int  # exit code; -9 after the signal 9
    seconds: float
    why: str  # the limit that ended the program: time, output, folder; "" if none did

    @property
    def is_good(self) -> bool:
        """It ended by itself, without an error."""
        return self.status == 0 and not self.why


class SandboxError(RuntimeError):
    """The program could not be confined, so it did not run.  One sentence, with what is missing."""
