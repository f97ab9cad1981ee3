"""Copies between host memory and the device, beside what the device computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor


def begin(pairs: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
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


def at_once(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the same, and return when all is copied; what `begin` has begun on its stream is not waited for."""
    for to, source in pairs:
        to.copy_(source, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


@cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
