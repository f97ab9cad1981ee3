"""The ways in which this machine can confine a program, and running one as another user."""

import os
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from megarl_sandbox.bubblewrap import Bubblewrap
from megarl_sandbox.execute import Jailer, execute
from megarl_sandbox.jail import Jail
from megarl_sandbox.kernel import prctl
from megarl_sandbox.layers import bubblewrap
from megarl_sandbox.limits import Limits
from megarl_sandbox.program import Result, SandboxError
from megarl_sandbox.python import own_python, python_for_others

NOBODY = 61234  # not 65534, whose processes in other containers count for a limit, too


class Mode(NamedTuple):
    jailer: Jailer
    user: int  # that starts the program

    def run(self, source: str, *, stdin: str = "", files: dict[str, str] | None = None, **limits: Any) -> Result:
        limits = {"seconds": 60, **limits}

        def start() -> Result:
            return execute(self.jailer, source, stdin=stdin, files=files or {}, limits=Limits(**limits))

        return start() if self.user == os.geteuid() else as_user(self.user, start)


def as_user(user: int, function: Callable[[], Any]) -> Any:
    """The function's result in a forked process of another user."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            prctl(4, 1)  # PR_SET_DUMPABLE: as a process of this user that was started, so that its /proc is its own
            answer = (True, function())
        except BaseException as error:
            answer = (False, repr(error))
        with open(write, "wb") as file:
            pickle.dump(answer, file)
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        is_good, value = pickle.load(file)
    os.waitpid(child, 0)
    if not is_good:
        raise SandboxError(value)
    return value


@cache
def modes() -> dict[str, Mode]:
    """All that work here, by name."""
    own, common, user = own_python(), python_for_others(), os.geteuid()
    found = {"with_namespaces": Mode(Jail(own, with_namespaces=True), user)}
    plain = own if user else common
    if plain is not None:
        found["without_namespaces"] = Mode(Jail(plain, with_namespaces=False), user)
    if user == 0 and common is not None:
        found["other_user_with_namespaces"] = Mode(Jail(common, with_namespaces=True), NOBODY)
        found["other_user_without_namespaces"] = Mode(Jail(common, with_namespaces=False), NOBODY)
    if isinstance(wrapped := bubblewrap(), Bubblewrap):
        found["bubblewrap"] = Mode(wrapped, user)
    return {name: mode for name, mode in found.items() if _works(mode)}


def _works(mode: Mode) -> bool:
    try:
        return mode.run("print('ran')").stdout == "ran\n"
    except SandboxError:
        return False
