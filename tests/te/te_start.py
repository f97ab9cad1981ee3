"""Starts ranks that have Transformer-Engine."""

import os
import pickle
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import spawn

loaded: Callable[[bytes], list[Any]] = cache(pickle.loads)  # what `run` gave, once for all tests that look at it


def run(num_ranks: int, fn: Callable[..., Any], *args: Any) -> bytes:
    """`run_ranks` for a process that started no ranks before: those of other tests have Megatron without it.

    In bytes: torch would hand each tensor to the tests' process as a file that stays open.
    """
    spawn.PRELOADED = ["te_on_cpu", *(name for name in spawn.PRELOADED if name != "te_on_cpu")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the process that loads them knows no other (Python 3.11)
    return pickle.dumps(spawn.run_ranks(num_ranks, fn, *args, timeout_s=400))
