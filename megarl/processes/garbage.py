"""Python's collection of cycles: not while a program imports, and rarely where many objects live long."""

from __future__ import annotations

import atexit
import gc
import sys
from importlib import import_module
from types import ModuleType


def imported(name: str) -> ModuleType:
    """A module, imported without collections, which would visit hundreds of thousands of objects that stay.

    torch and transformers would cause half a dozen of them, together a tenth of the time of the imports.  No later
    collection visits what is there now.
    """
    if name in sys.modules:
        return sys.modules[name]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else libraries print that something is left of them
        if was_enabled:
            gc.enable()


def leave_alone_what_is_here() -> None:
    """No later collection visits what this process has now: after it has started, before it serves."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


def collect_garbage_rarely() -> None:
    """Only cycles need the collector, and they are rare in what this process does.

    With 10,000 requests in flight Python's own thresholds let it walk through their objects for half of the time.
    """
    leave_alone_what_is_here()
    gc.set_threshold(100_000, 50, 50)
