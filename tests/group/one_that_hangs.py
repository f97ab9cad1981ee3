"""A rank that hangs, and heeds nobody who asks it to end."""

import os
import signal
import time

from megarl.group.ranks import PARENT
from megarl.rollout.lifetime import die_with_parent

die_with_parent(int(os.environ[PARENT]))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("hangs")
time.sleep(600)  # longer than a test may take
