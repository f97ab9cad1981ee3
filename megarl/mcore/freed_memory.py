"""What the C library does with memory that a process has freed: as it comes, or kept for the next tensors."""

from __future__ import annotations

import ctypes

# The parameters of glibc's mallopt(3), from its malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 30
MOST_BYTES = 32 << 20  # that older glibc takes for M_MMAP_THRESHOLD


def keep_freed_memory() -> None:
    """Let this process keep up to a GiB at the end of its heap, and take tensors of up to a GiB from there.

    By default glibc gives it back as soon as the tensors of a pass are freed.  The next pass gets it page by page, each
    with a fault and filled with zeros.  With older glibc this is so for tensors of more than 32 MiB; another C library
    or allocator is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    if not mallopt(M_MMAP_THRESHOLD, KEPT_BYTES):
        mallopt(M_MMAP_THRESHOLD, MOST_BYTES)
