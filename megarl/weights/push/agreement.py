"""Collectives of the trainer's ranks for plain values: JSON in tensors, so that no rank unpickles anything."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_json(value: Any) -> list[Any]:
    """Gather the values of all ranks of the world on every rank, in rank order; tuples come back as lists.

    A collective. Peak extra memory: the longest text times the number of ranks.
    """
    mine = _encode(value)
    sizes = [torch.empty(1, dtype=torch.int64, device=mine.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)], device=mine.device))
    longest = max(int(size) for size in sizes)
    padded = torch.cat([mine, mine.new_zeros(longest - len(mine))])
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded)
    return [_decode(text[: int(size)]) for text, size in zip(texts, sizes, strict=True)]


def broadcast_json(value: Any) -> Any:
    """Return on every rank the value that rank 0 of the world passed.  A collective."""
    mine = _encode(value if dist.get_rank() == 0 else None)
    size = torch.tensor([len(mine)], device=mine.device)
    dist.broadcast(size, src=0)
    text = mine if dist.get_rank() == 0 else mine.new_empty(int(size))
    dist.broadcast(text, src=0)
    return _decode(text)


def _encode(value: Any) -> Tensor:
    """[bytes] uint8 on a device that the world's backend supports."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _decode(text: Tensor) -> Any:
    return json.loads(text.cpu().numpy().tobytes())
