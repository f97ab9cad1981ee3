"""What the C library does with memory that a process has freed: as it comes, or kept for the next tensors."""

from __future__ import annotations

import ctypes

# The parameters of glibc's mallopt(3), from its malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Let this process keep up to a GiB at the end of its heap, and take tensors of up to a GiB from there.

    By default glibc gives it back as soon as the tensors of a pass are freed.  The next pass gets it page by page, each
    with a fault and filled with zeros.  Another C library is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        assert mallopt(parameter, KEPT_BYTES), f"mallopt({parameter}, {KEPT_BYTES}) failed: glibc takes any size"
