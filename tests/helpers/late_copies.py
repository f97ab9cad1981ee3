"""Copies to the device that come as late as they may: what does not wait for them reads no numbers."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from unittest import mock

from torch import Tensor

from megarl.mcore.training import offload

NO_NUMBER = 0xFF  # as every byte it is NaN in float32 and in bfloat16


def late_copies() -> AbstractContextManager[object]:
    """Inside this context nothing is copied before somebody waits for it."""
    return mock.patch.object(offload, "begin_copies", _begin)


def _begin(pairs: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    kept = [*pairs]
    for to, _ in kept:
        to.fill_(NO_NUMBER)

    def arrive() -> None:
        for to, source in kept:
            to.copy_(source)

    return arrive
