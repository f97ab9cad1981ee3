"""Faults that a part of a run commits by itself: a test leaves orders in a folder, and whoever takes one obeys it once.

The parts are programs of their own; the folder is beside this file.  Nothing heavy is imported here, because rewards
and servers load it.
"""

import os
from pathlib import Path

ORDERS = Path(__file__).parent / "orders"


def take(part: str) -> str | None:
    """The kind of an order for this part, which is gone then; None: there is none.  Two takers never get the same."""
    for order in sorted(ORDERS.glob(f"{part}.*")):
        try:
            order.unlink()
        except FileNotFoundError:  # another process was faster
            continue
        return order.name.split(".")[1]
    return None


def obey(part: str) -> str | None:
    """Take an order and raise an error, or end the process; returns any other kind, which the part obeys in its way."""
    kind = take(part)
    if kind == "raise":
        raise KeyError(f"no such {part}")
    if kind == "exit":
        os._exit(3)
    return kind
