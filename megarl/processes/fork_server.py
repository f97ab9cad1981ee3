"""What the fork server of `programs` imports: a fork server has no other hook.

It ends with the process that started it, and imports in silence, since the driver's run says itself what is missing.
"""

import os
import warnings

from megarl.processes.garbage import imported
from megarl.processes.lifetime import die_with_parent
from megarl.processes.programs import IMPORTS

# multiprocessing starts a fork server again that was killed, with all variables that its process has then.
if IMPORTS not in os.environ:
    raise SystemExit("the fork server was killed; programs are started without it")
os.setsid()  # a signal to the group of the driver would end it, and all that it started
die_with_parent(os.getppid())
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for module in os.environ[IMPORTS].split():
        imported(module)
