"""A world of ranks and the driver's handle on it.

`group.py` is the driver's side, `follow.py` a rank's; what passes between them is in `processes/`, and ranks on other
machines are started through `machines/`.  The room knows processes, calls and failures; it knows no models: what a call
means is the business of `roles/`.
"""

from megarl.group.group import Group, RankError, Reply

__all__ = ["Group", "RankError", "Reply"]
