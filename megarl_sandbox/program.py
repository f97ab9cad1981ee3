"""A program to run, with its files, folder and limits; and what comes back from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megarl_sandbox.limits import Limits


@dataclass(frozen=True)
class Program:
    """Example: Program("/tmp/x", {"main.py": b"print(1)"}, "main.py", Limits())."""

    folder: str  # empty, of this user
    files: Mapping[str, bytes]  # plain name -> content
    main: str
    limits: Limits

    def write_files(self, folder: str, user: int) -> None:
        """Put the files into the folder, and give both to the user."""
        for name, content in self.files.items():
            path = f"{folder}/{name}"
            with open(path, "wb") as file:
                file.write(content)
            os.chown(path, user, -1)
        os.chown(folder, user, -1)

    def environment(self, folder: str) -> dict[str, str]:
        """All variables that the program gets."""
        return {
            "PATH": "/usr/bin:/bin",
            "HOME": folder,
            "TMPDIR": folder,
            "LANG": "C.UTF-8",
            "MALLOC_ARENA_MAX": "2",  # else every thread takes 64 MiB of the address space
        }


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
