"""How much memory of this machine a process may still take."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Free memory of this machine, or what a limit of the process or of its container leaves, if that is less.

    Pages of files that nobody has used for a while count as free, as the kernel gives them up first.
    """
    free: int = psutil.virtual_memory().available
    if (most := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        free = min(free, most - psutil.Process().memory_info().vms)
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except FileNotFoundError:  # no container, or one of the first version of control groups
        return free
    return free if limit == "max" else min(free, int(limit) - int(used) + int(stat["inactive_file"]))
