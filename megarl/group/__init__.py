"""A world of ranks and the driver's handle on it.

`group.py` is the driver's side, `follow.py` a rank's, `wire.py` what passes between them.  On several machines
`nodes.py` is the driver's side, `agent.py` that of every machine but the first, and a `relay.py` there stands between
the driver and the machine's ranks.  The room knows processes, calls and failures; it knows no models: what a call means
is the business of `roles/`.
"""

from megarl.group.group import Group, RankError, Reply
from megarl.group.nodes import NodeLost, Nodes

__all__ = ["Group", "NodeLost", "Nodes", "RankError", "Reply"]
