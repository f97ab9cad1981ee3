"""The Python that programs run with, and the files that it needs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

# Not all of /usr, where images of containers may have the user's files, such as /usr/src/app.
_IN_USR = ("bin", "lib", "lib32", "lib64", "libexec", "local/bin", "local/lib", "local/lib64", "share/zoneinfo")
SYSTEM = (*(f"/usr/{name}" for name in _IN_USR), "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


@dataclass(frozen=True)
class Python:
    """An interpreter, and folders that hold it and its standard library."""

    path: str
    folders: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """Without the user's settings, installed packages, and files with byte code."""
        return [self.path, "-I", "-S", "-B"]

    @property
    def readable(self) -> list[str]:
        return [path for path in dict.fromkeys((*SYSTEM, *self.folders)) if os.path.exists(path)]


def own_python() -> Python:
    """The interpreter of this process."""
    return _python(os.path.realpath(sys.executable), sys.base_prefix)


def python_for_others() -> Python | None:
    """An interpreter that other users can start: that of this process, else the system's; None if there is none."""
    own = own_python()
    for python in (own, _python(os.path.realpath("/usr/bin/python3"), "/usr")):
        if os.path.exists(python.path) and all(is_open_to_all(path) for path in (python.path, *python.folders)):
            return python
    return None


def is_open_to_all(path: str) -> bool:
    """Whether every user may enter all folders above a path, and the path."""
    own = Path(path).resolve()
    return all(folder.stat().st_mode & 0o001 for folder in (own, *own.parents))


def _python(path: str, prefix: str) -> Python:
    home = os.path.realpath(prefix)
    folders = tuple(f"{home}/{name}" for name in ("bin", "lib", "lib64") if os.path.isdir(f"{home}/{name}"))
    return Python(path, () if home == "/usr" else folders)
