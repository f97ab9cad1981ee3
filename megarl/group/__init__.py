"""A world of ranks and the driver's handle on it.

`group.py` is the driver's side, `follow.py` a rank's, `wire.py` what passes between them.  The room knows processes,
calls and failures; it knows no models: what a call means is the business of `roles/`.
"""

from megarl.group.group import Group, RankError, Reply

__all__ = ["Group", "RankError", "Reply"]
