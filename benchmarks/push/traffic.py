"""Counts what a push moves between the trainer's ranks, and what it asks of servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from megarl.rollout.client import ServerClient


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Of this rank: `received`, bytes from other processes; `transfers`, by which they came; `requests` to servers."""
    found = {"received": 0, "transfers": 0, "requests": 0}

    def note(num_bytes: int) -> None:
        found["received"] += num_bytes
        found["transfers"] += num_bytes > 0

    def around(owner: Any, name: str, before: Callable[..., None]) -> Any:
        call = getattr(owner, name)

        def wrapped(*args: Any, **named: Any) -> Any:
            before(*args, **named)
            return call(*args, **named)

        return mock.patch.object(owner, name, wrapped)

    def broadcast(tensor: Any, src: Any = None, group: Any = None, group_src: Any = None, **_: Any) -> None:
        own = dist.get_rank(group) if group_src is not None else dist.get_rank()
        note(tensor.nbytes if own != (src if group_src is None else group_src) else 0)

    def all_gather(parts: Any, mine: Any, **_: Any) -> None:
        note(sum(part.nbytes for part in parts) - mine.nbytes)

    def batch(ops: Any) -> None:
        for op in ops:
            note(op.tensor.nbytes if op.op is dist.irecv else 0)

    def request(*_: Any, **__: Any) -> None:
        found["requests"] += 1

    with ExitStack() as stack:
        for owner, name, before in (
            (dist, "broadcast", broadcast),
            (dist, "all_gather", all_gather),
            (dist, "batch_isend_irecv", batch),
            (ServerClient, "_call", request),
        ):
            stack.enter_context(around(owner, name, before))
        yield found
