"""What the fork server of `programs` imports: a fork server has no other hook.

It ends with the process that started it, and imports in silence, since the driver's run says itself what is missing.
"""

import errno
import os
import sys
import warnings

from megarl.processes.garbage import imported
from megarl.processes.lifetime import die_with_parent
from megarl.processes.programs import IMPORTS

# multiprocessing starts a fork server again that was killed, with all variables that its process has then.
if IMPORTS not in os.environ:
    raise SystemExit("the fork server was killed; programs are started without it")
os.setsid()  # a signal to the group of the driver would end it, and all that it started
die_with_parent(os.getppid())
_fork = os.fork


def _fork_or_go_on() -> int:
    """A fork that fails (no process or memory is left) would end the fork server, and all that it has forked.

    It goes on after ECONNABORTED alone; closed are the files of the request, so that who sent it knows.
    """
    try:
        pid = _fork()
    except OSError as error:
        request = sys._getframe(1).f_locals  # of multiprocessing.forkserver.main
        for file in (request["child_r"], request["child_w"], *request["fds"]):
            os.close(file)
        raise OSError(errno.ECONNABORTED, error.strerror) from error
    if pid == 0:
        os.fork = _fork
    return pid


os.fork = _fork_or_go_on
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for module in os.environ[IMPORTS].split():
        imported(module)
