"""The machines of a run: `nodes` is the driver's side, `agent` that of every machine but the first.

An agent starts ranks (`processes.ranks`, with a relay between them and the driver) and servers when the driver says so.
The room knows machines, orders and failures; it knows no models.
"""

from megarl.machines.nodes import NodeLost, Nodes

__all__ = ["NodeLost", "Nodes"]
