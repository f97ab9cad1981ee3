"""Starts ranks that have Transformer-Engine."""

import os
import sys
from collections.abc import Callable
from typing import Any

import spawn


def run(num_ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`run_ranks` for a process that started no ranks before: those of other tests have Megatron without it."""
    spawn.PRELOADED = ["te_on_cpu", *(name for name in spawn.PRELOADED if name != "te_on_cpu")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the process that loads them knows no other (Python 3.11)
    return spawn.run_ranks(num_ranks, fn, *args, timeout_s=400)
