"""The sandbox made by the program bwrap, for kernels without Landlock: namespaces, with our limits and seccomp."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from megarl_sandbox import seccomp
from megarl_sandbox.kernel import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, prctl
from megarl_sandbox.limits import apply, become, own_tasks, spare_user
from megarl_sandbox.program import Program
from megarl_sandbox.python import DEVICES, Python

WORK = "/tmp"
_PROGRAM = 2  # its number in its own namespace; bwrap is 1
_OF_BWRAP = 3  # processes of bwrap itself
_REPORT = "report"  # the name of a file, in which bwrap says how the program ended


@dataclass(frozen=True)
class Bubblewrap:
    """Example: Bubblewrap(python, "/usr/bin/bwrap").enter(program)."""

    python: Python
    bwrap: str
    can_fill_the_disk: bool = False  # the folder is in memory and of limited size

    def has_begun(self, program: Program, status: int) -> bool:
        """bwrap fails with status 1 and without a report; a program that kills bwrap leaves another status."""
        return status != 1 or "exit-code" in Path(program.folder, _REPORT).read_text()

    def enter(self, program: Program) -> None:
        """Turn this process, which was forked for it, into the program; returns never, or raises OSError."""
        is_root = os.geteuid() == 0
        others = _OF_BWRAP + (0 if is_root else own_tasks())
        report = os.open(f"{program.folder}/{_REPORT}", os.O_CREAT | os.O_WRONLY)  # outside: no program can write it
        os.set_inheritable(report, True)
        if is_root:
            become(spare_user(os.getpid()))
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        command = [self.bwrap, "--json-status-fd", str(report)]
        command += ["--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--chdir", WORK]
        for path in self.python.readable:
            is_link = os.path.islink(path)
            command += ["--symlink", os.readlink(path), path] if is_link else ["--ro-bind", path, path]
        for path in DEVICES:
            command += ["--dev-bind", path, path]
        command += ["--size", str(program.limits.folder_bytes), "--tmpfs", WORK]
        for name, content in program.files.items():
            command += ["--file", str(_in_memory(content)), f"{WORK}/{name}"]
        command += ["--remount-ro", "/"]
        command += ["--seccomp", str(_in_memory(seccomp.filter_program((0, _PROGRAM))))]
        command += ["--", *self.python.command, f"{WORK}/{program.main}"]
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        apply(program.limits, others)
        os.execve(self.bwrap, command, program.environment(WORK))


def _in_memory(content: bytes) -> int:
    """A file that bwrap can read, as an open descriptor."""
    descriptor = os.memfd_create("megarl", 0)  # inherited
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
