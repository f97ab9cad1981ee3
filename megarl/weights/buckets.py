"""Which tensors travel together: consecutive ones of one type, up to a number of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.weights.names import Shape, num_bytes

Sizes = Mapping[str, tuple[Shape, torch.dtype]]  # HF name -> shape and type, in the order of export


@dataclass(frozen=True)
class Bucket:
    """One message: the bytes of its tensors end to end, in row-major order.

    Example: names ["a", "b"], shapes [(2,), (3,)], float32: `data` holds 20 bytes, of which a has the first 8.
    """

    names: list[str]
    shapes: list[Shape]
    dtype: torch.dtype
    data: Tensor  # [bytes] uint8; valid until the next bucket is filled
    is_last: bool

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """(name, its bytes) of every tensor."""
        sizes = [num_bytes(shape, self.dtype) for shape in self.shapes]
        yield from zip(self.names, self.data.split(sizes), strict=True)


def plan_buckets(sizes: Sizes, bucket_bytes: int) -> list[list[str]]:
    """Names of each bucket; one type a bucket, as its receiver reads offsets that are aligned to that type.

    A tensor larger than `bucket_bytes` has a bucket of its own.
    """
    plan: list[list[str]] = []
    filled, current = 0, None
    for name, (shape, dtype) in sizes.items():
        size = num_bytes(shape, dtype)
        if not plan or dtype != current or filled + size > bucket_bytes:
            plan.append([])
            filled, current = 0, dtype
        plan[-1].append(name)
        filled += size
    return plan


def fill_buckets(stream: Iterator[tuple[str, Tensor]], sizes: Sizes, bucket_bytes: int) -> Iterator[Bucket]:
    """The tensors of `stream`, which come in the order of `sizes`, as buckets that share one buffer."""
    plan = plan_buckets(sizes, bucket_bytes)
    buffer: Tensor | None = None
    for i, names in enumerate(plan):
        is_last = i == len(plan) - 1
        shapes, dtype = [sizes[n][0] for n in names], sizes[names[0]][1]
        total = sum(num_bytes(shape, dtype) for shape in shapes)
        at = 0
        for name in names:
            got, tensor = next(stream)
            assert (got, tensor.dtype) == (name, dtype), f"got {got} as {tensor.dtype}, want {name} as {dtype}"
            raw = tensor.reshape(-1).view(torch.uint8)
            if buffer is None or buffer.numel() < total:
                buffer = raw.new_empty(max(total, min(bucket_bytes, _total(sizes))))
            buffer[at : at + raw.numel()].copy_(raw)
            at += raw.numel()
        assert buffer is not None and at == total, f"a bucket of {total} bytes was filled with {at}"
        yield Bucket(names, shapes, dtype, buffer[:total], is_last)


def _total(sizes: Sizes) -> int:
    return sum(num_bytes(shape, dtype) for shape, dtype in sizes.values())
