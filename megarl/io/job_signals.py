"""SIGTERM and SIGUSR1, which schedulers send to every process of a job: which of our processes heed them.

The driver and the agents of other machines do (`processes.signals`).  All others leave them to these, since the running
step needs them until it is saved; who ends such a process says it over a pipe, or sends another signal.
"""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import resource_tracker

ASKS = (signal.SIGUSR1, signal.SIGTERM)
_num_received = 0


def hold_back_for_good() -> None:
    """Block both here and in what this process starts: for a server that others wrote, which may set handlers.

    multiprocessing unblocks SIGTERM when it starts its resource tracker, so this starts it first.
    """
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKS)


def leave_to_driver(*, runs_users_code: bool = False) -> None:
    """Heed neither; call it in the main thread.  What this process starts heeds them neither, as SIG_IGN stays.

    `runs_users_code`: what that starts has their usual effect again, for which a handler is gone after exec.
    """
    for number in ASKS:
        signal.signal(number, _note if runs_users_code else signal.SIG_IGN)
    if runs_users_code:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS)
        os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_usual_effect)


def num_received() -> int:
    """How many have come to a process that runs users' code: what that has started may be ended by one."""
    return _num_received


def _note(*_: object) -> None:
    global _num_received
    _num_received += 1


_forking = threading.local()


def _hold_back() -> None:
    """Until the new process has set the usual effect: else one that comes before would be noted there, and lost."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ASKS)


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _usual_effect() -> None:
    for number in ASKS:
        signal.signal(number, signal.SIG_DFL)
    _let_through()
