"""What this machine can confine code with, the choice among it, and `run`, which runs code there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from megarl_sandbox import landlock, seccomp
from megarl_sandbox.bubblewrap import Bubblewrap
from megarl_sandbox.execute import Jailer, execute
from megarl_sandbox.jail import Jail
from megarl_sandbox.limits import Limits
from megarl_sandbox.program import Result, SandboxError
from megarl_sandbox.python import own_python, python_for_others
from megarl_sandbox.service import Service

AUTO, JAIL, BUBBLEWRAP, URL = "auto", "jail", "bubblewrap", "url:"
WANTED = f"{AUTO}, {JAIL}, {BUBBLEWRAP} or {URL}http://HOST:PORT"
_LANDLOCK_OF_SAME_USER = 3  # before it, files could be emptied
_NO_PYTHON = "a Python that other users may start, such as /usr/bin/python3"


class Layer(NamedTuple):
    """Example: Layer("Landlock", "version 7", True)."""

    name: str
    found: str
    is_there: bool


def layers() -> list[Layer]:
    """What this machine has, for a table."""
    version = landlock.abi()
    has_namespaces = _fault(Jail(own_python(), with_namespaces=True)) == "" if _has_kernel_layers() else False
    bwrap = shutil.which("bwrap")
    return [
        Layer("Landlock", f"version {version}" if version else "absent", version > 0),
        Layer("seccomp", "present" if seccomp.is_supported() else "absent", seccomp.is_supported()),
        Layer("namespaces", "allowed" if has_namespaces else "not allowed", has_namespaces),
        Layer("bubblewrap", bwrap or "absent", bwrap is not None),
        Layer("sandbox", *_verdict()),
    ]


def is_known(choice: str) -> bool:
    """Whether `reward.sandbox` may have this value."""
    return choice in (AUTO, JAIL, BUBBLEWRAP) or choice.startswith((f"{URL}http://", f"{URL}https://"))


def check(choice: str) -> Jailer | Service:
    """The sandbox of this name; it has run a program, unless it is a service.

    Raises SandboxError of one sentence with all that is missing.
    """
    assert is_known(choice), f"sandbox {choice!r}: expected {WANTED}"
    if choice.startswith(URL):
        return Service(choice.removeprefix(URL))
    missing = []
    for name, find in ((JAIL, jail), (BUBBLEWRAP, bubblewrap)):
        if choice in (AUTO, name):
            found = find()
            if not isinstance(found, str):
                return found
            missing.append(f"{name} needs {found}")
    raise SandboxError(f"code cannot be confined on this machine: {'; '.join(missing)}")


def use(choice: str) -> None:
    """From now on `run` uses this sandbox in this process; see `check`."""
    _Used.choice = choice


def chosen() -> Jailer | Service:
    """The sandbox that `use` chose, by default the best of this machine.  Raises SandboxError."""
    return check(_Used.choice)


def run(
    source: str,
    *,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    sandbox: Jailer | Service | None = None,
) -> Result:
    """Run Python source in a sandbox; returns when none of its processes is left.

    Args:
        stdin: what it reads.
        files: plain names and contents of further files in its folder, which is also its working folder.
        sandbox: by default that of `use`.
    Raises SandboxError if there is no sandbox: code never runs without one.  What the code does is no error.

    Example: run("print(1 + int(input()))", stdin="2").stdout == "3\\n".
    """
    where = sandbox or chosen()
    limits, files = limits or Limits(), files or {}
    assert all("/" not in name for name in files), f"plain names are expected, not {list(files)}"
    if isinstance(where, Service):
        return where.run(source, stdin=stdin, files=files, limits=limits)
    return execute(where, source, stdin=stdin, files=files, limits=limits)


@cache
def jail() -> Jail | str:
    """The sandbox of the kernel's own layers, with namespaces if possible; else what it needs."""
    if not _has_kernel_layers():
        return "Landlock (Linux 5.13 or newer, with landlock among its security modules) and seccomp on x86-64 or ARM"
    fault = _fault(inside := Jail(own_python(), with_namespaces=True))
    if not fault:
        return inside
    is_root = os.geteuid() == 0
    python = python_for_others() if is_root else own_python()
    if python is None:
        return f"namespaces ({fault}) or {_NO_PYTHON}"
    if not is_root and landlock.abi() < _LANDLOCK_OF_SAME_USER:
        return f"namespaces ({fault}) or Landlock of Linux 6.2 or newer"
    fault = _fault(plain := Jail(python, with_namespaces=False))
    return plain if not fault else f"other rights: {fault}"


@cache
def bubblewrap() -> Bubblewrap | str:
    """The sandbox of the program bwrap; else what it needs."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return "the program bwrap: apt-get install bubblewrap"
    if not seccomp.is_supported():
        return "seccomp on x86-64 or ARM"
    python = python_for_others() if os.geteuid() == 0 else own_python()
    if python is None:
        return _NO_PYTHON
    fault = _fault(found := Bubblewrap(python, bwrap))
    return found if not fault else f"user namespaces: {fault}"


class _Used:
    choice = AUTO


def _has_kernel_layers() -> bool:
    return landlock.abi() > 0 and seccomp.is_supported()


@cache
def _fault(jailer: Jailer) -> str:
    """Why a program cannot run there; "" if it can."""
    try:
        result = execute(jailer, "print('ran')", stdin="", files={}, limits=Limits(seconds=30))
    except SandboxError as error:
        return str(error)
    if result.stdout == "ran\n":
        return ""
    return (result.stderr.strip().splitlines() or [f"a first program ended with status {result.status}"])[-1]


def _verdict() -> tuple[str, bool]:
    try:
        found = check(AUTO)
    except SandboxError as error:
        return str(error), False
    return type(found).__name__.lower(), True
