"""A group of ranks and the driver's handle on it.

`group.py` is the driver's side, `follow.py` the rank's side, `message.py` what they send, `failures.py` has the errors
about ranks; `processes/` has their connections, and `machines/` starts ranks on other machines.  The package handles
processes, calls and failures, but no models: `roles/` defines the calls.
"""

from megarl.group.failures import RankError
from megarl.group.group import Group, GroupSettings, Reply

__all__ = ["Group", "GroupSettings", "RankError", "Reply"]
