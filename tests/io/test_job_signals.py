"""Signals of schedulers in processes of their own: which of them end a process that users' code has forked."""

import subprocess
import sys

import pytest

EARLY = """
import os, signal
from megarl.io.job_signals import leave_to_driver

os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.{signal}))  # before all else there
leave_to_driver(runs_users_code=True)
child = os.fork()
if child == 0:
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.{signal})
os.kill(os.getpid(), signal.{signal})
print(signal.pthread_sigmask(signal.SIG_BLOCK, []) == set())
"""


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGUSR1"])
def test_a_signal_at_the_birth_of_a_forked_process_ends_it_and_not_its_parent(signal):
    """`multiprocessing.Pool.terminate` waits for good for a worker that has lost its signal."""
    program = [sys.executable, "-c", EARLY.format(signal=signal)]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True"])
