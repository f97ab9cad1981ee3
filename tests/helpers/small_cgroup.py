"""A real control group with a limit of memory, of the first or the second version; who tests is root."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def small_cgroup(limit: int) -> Iterator[Callable[[], None]]:
    """`limit`: bytes.  What it gives is called in a child, to put it there."""
    first = (CGROUPS / "memory").is_dir()
    folder = (CGROUPS / "memory" if first else CGROUPS) / f"megarl_test_{os.getpid()}"
    folder.mkdir()
    try:
        (folder / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit))
        yield lambda: (folder / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        deadline = time.monotonic() + 60
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        folder.rmdir()
