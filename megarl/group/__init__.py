"""A group of ranks and the driver's handle on it.

`group.py` is the driver's side, `follow.py` the rank's side; `processes/` has their connections, and `machines/` starts
ranks on other machines.  The package handles processes, calls and failures, but no models: `roles/` defines the calls.
"""

from megarl.group.group import Group, RankError, Reply

__all__ = ["Group", "RankError", "Reply"]
