"""Host memory of an exact size, pinned if there is a GPU; and copies between it and the device, beside computation.

torch's own pinned memory is rounded up to a power of two, up to twice the bytes, and is never given back to the system
(CachingHostAllocator.h).
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes; of each part
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs of the process


class HostMemory:
    """One block of memory, divided into parts.  Its tensors must not be used after it is gone."""

    def __init__(self, sizes: Iterable[int]) -> None:
        """`sizes`: bytes of each part.  RuntimeError if the memory cannot be pinned, OSError if there is not enough."""
        self.sizes = tuple(sizes)
        starts = []
        end = 0
        for size in self.sizes:
            starts.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes, self.parts = end, list[Tensor]()
        if end == 0:
            return
        # Whole pages, which no other allocation shares: CUDA pins pages, and refuses one that is pinned already.
        block = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(block, dtype=torch.uint8)
        if torch.cuda.is_available():
            _pin(whole.data_ptr(), end)
            weakref.finalize(self, _unpin, whole.data_ptr()).atexit = False  # at exit the system frees all of it
        self.parts = [whole[start : start + size] for start, size in zip(starts, self.sizes, strict=True)]


def _pin(address: int, num_bytes: int) -> None:
    """Raises RuntimeError with CUDA's number of the error."""
    if code := int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE)):
        raise RuntimeError(f"{num_bytes} bytes of host memory cannot be pinned: cudaHostRegister returned {code}")


def _unpin(address: int) -> None:
    code = int(torch.cuda.cudart().cudaHostUnregister(address))
    assert code == 0, f"what was pinned can be unpinned: cudaHostUnregister returned {code}"


def begin_copies(pairs: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """Begin to copy the second tensor of each pair into the first, of as many bytes.

    Before anybody uses either, or frees it, what is returned is called: it ends when all is copied.  On a GPU this is
    done by a stream of its own, if the host's memory is pinned; without one there is nothing left to wait for.
    """
    if not torch.cuda.is_available():
        for to, source in pairs:
            to.copy_(source)
        return lambda: None
    stream = _stream(torch.cuda.current_device())
    # The new memory may be what the computing stream has just freed, with its last work there still to be done.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for to, source in pairs:
            to.copy_(source, non_blocking=True)
        # The host waits, not a stream: then the copy is there for every stream, also for an optimizer's own.
        return stream.record_event().synchronize


def copy_at_once(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the same, and return when all is copied; what `begin_copies` has begun on its stream is not waited for."""
    for to, source in pairs:
        to.copy_(source, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


@cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
