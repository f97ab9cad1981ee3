"""The sandbox made of the kernel's own layers: needs no program, and no rights."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from megarl_sandbox import landlock, namespaces, seccomp
from megarl_sandbox.kernel import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, prctl
from megarl_sandbox.limits import apply, become, own_tasks, spare_user
from megarl_sandbox.program import Program
from megarl_sandbox.python import DEVICES, Python


@dataclass(frozen=True)
class Jail:
    """Example: Jail(own_python(), with_namespaces=True).enter(program)."""

    python: Python
    with_namespaces: bool

    @property
    def can_fill_the_disk(self) -> bool:
        """The kernel limits each file, but not the folder: the process that waits for the program measures it."""
        return not self.with_namespaces

    def has_begun(self, program: Program, status: int) -> bool:
        """This process becomes the program itself: no other one can fail."""
        return True

    def enter(self, program: Program) -> None:
        """Turn this process, which was forked for it, into the program; returns never, or raises OSError."""
        is_root = os.geteuid() == 0
        user = spare_user(os.getpid()) if is_root else os.geteuid()
        others = 0 if is_root or self.with_namespaces else own_tasks()
        work = program.folder
        if self.with_namespaces:
            namespaces.enter()
            namespaces.own_root(work, self.python.readable, DEVICES, program.limits, user)
            work = namespaces.WORK
        program.write_files(work, user)
        if is_root:
            become(user)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # `become` took it back
        os.chdir(work)
        os.umask(0o077)
        command = [*self.python.command, f"{work}/{program.main}"]
        rules = [(path, landlock.READ) for path in self.python.readable]
        rules += [(path, landlock.DEVICE) for path in DEVICES]
        rules.append((work, landlock.WORK))
        calls = seccomp.filter_program((0, os.getpid()))
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        landlock.restrict(rules)
        seccomp.restrict(calls)
        # Last: this process, a copy of its parent, may need more memory than the program may have.
        apply(program.limits, others)
        os.execve(command[0], command, program.environment(work))
