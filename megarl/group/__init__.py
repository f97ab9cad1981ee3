"""A world of ranks and the driver's handle on it.

`group.py` is the driver's side, `follow.py` a rank's; what passes between them is in `processes/`.  On several machines
`nodes.py` is the driver's side and `agent.py` that of every machine but the first.  The room knows processes, calls and
failures; it knows no models: what a call means is the business of `roles/`.
"""

from megarl.group.group import Group, RankError, Reply
from megarl.group.nodes import NodeLost, Nodes

__all__ = ["Group", "NodeLost", "Nodes", "RankError", "Reply"]
