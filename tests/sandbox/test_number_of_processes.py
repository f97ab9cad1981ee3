"""The limit of processes where the same user has others that a process does not see, as in another container."""

import os
import subprocess

import pytest
from sandbox_modes import as_user

from megarl_sandbox.execute import execute
from megarl_sandbox.jail import Jail
from megarl_sandbox.kernel import CLONE_NEWNS, CLONE_NEWPID, mount, unshare
from megarl_sandbox.limits import Limits, own_tasks
from megarl_sandbox.program import Result
from megarl_sandbox.python import python_for_others

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root has processes of two users")

USER, OTHERS, PROCESSES = 61236, 30, 12
_REC, _PRIVATE = 1 << 14, 1 << 18
SOURCE = """
import os, signal
begun = 0
try:
    for _ in range(100):
        if os.fork() == 0:
            signal.pause()
        begun += 1
except BlockingIOError:
    print(begun)
"""


def in_another_container(function):
    """The function's result for USER, in a namespace of processes that has none of the others."""

    def inside():
        mount("none", "/", None, _REC | _PRIVATE)
        mount("proc", "/proc", "proc", 0)
        return as_user(USER, function)

    def outside():
        unshare(CLONE_NEWPID | CLONE_NEWNS)
        return as_user(0, inside)

    return as_user(0, outside)


@pytest.fixture
def others():
    processes = [subprocess.Popen(["/bin/sleep", "900"], user=USER, group=USER) for _ in range(OTHERS)]
    yield
    for process in processes:
        process.kill()
        process.wait()


def confined() -> Result:
    python = python_for_others()
    assert python is not None, "a Python that other users may start"
    jail = Jail(python, with_namespaces=False)
    return execute(jail, SOURCE, stdin="", files={}, limits=Limits(seconds=60, processes=PROCESSES))


@pytest.mark.full
def test_processes_that_are_not_seen_count_and_a_program_gets_its_number_of_them(others):
    """The asking process is one more."""
    assert as_user(USER, own_tasks) == in_another_container(own_tasks) == OTHERS + 1
    result = in_another_container(confined)
    assert result.is_good, result
    assert int(result.stdout) == PROCESSES
