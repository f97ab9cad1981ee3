"""Buckets: consecutive tensors of one dtype that are sent together, up to a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.weights.mapping.names import Shape, num_bytes
from megarl.weights.push.report import Clock

Sizes = Mapping[str, tuple[Shape, torch.dtype]]  # HF name -> shape and type, in the order of export
NewBuffer = Callable[[int, torch.device], Tensor]


@dataclass(frozen=True)
class Bucket:
    """One message: the bytes of its tensors one after another, in row-major order.

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
    """Names of each bucket; a bucket has one dtype, because its receiver reads offsets aligned to that dtype.

    A tensor larger than `bucket_bytes` has a bucket of its own; so have two larger tensors that must stay together.
    """
    plan: list[list[str]] = []
    filled, current = 0, None
    for names in _inseparable(sizes):
        size, dtype = _total(names, sizes), sizes[names[0]][1]
        if not plan or dtype != current or filled + size > bucket_bytes:
            plan.append([])
            filled, current = 0, dtype
        plan[-1] += names
        filled += size
    return plan


def _inseparable(sizes: Sizes) -> Iterator[list[str]]:
    """Each tensor alone, except two neighbours that SGLang fuses: it drops one that comes without the other."""
    run: list[str] = []
    for name in sizes:
        if run and not _are_fused(run[-1], name):
            yield run
            run = []
        run.append(name)
    yield run


def _are_fused(first: str, second: str) -> bool:
    module, found, _ = first.partition(".q_a_proj.")
    return bool(found) and second.startswith(f"{module}.kv_a_proj_with_mqa.")


def fill_buckets(
    stream: Iterator[tuple[str, Tensor]],
    sizes: Sizes,
    bucket_bytes: int,
    *,
    new_buffer: NewBuffer | None = None,
    clock: Clock | None = None,
) -> Iterator[Bucket]:
    """The tensors of `stream`, in the order of `sizes`, as buckets that share one buffer.

    `new_buffer` makes that buffer: [bytes] uint8 on the given device, ordinary memory by default.  `clock` counts the
    seconds in which `stream` gathers a tensor (gather), and in which tensors are copied into the bucket (convert).
    """
    clock = clock or Clock()
    buffer: Tensor | None = None
    plan = plan_buckets(sizes, bucket_bytes)
    largest = max(_total(names, sizes) for names in plan)
    for i, names in enumerate(plan):
        shapes, dtype = [sizes[n][0] for n in names], sizes[names[0]][1]
        at = 0
        for name in names:
            with clock("gather"):
                got, tensor = next(stream)
            assert (got, tensor.dtype) == (name, dtype), f"got {got} as {tensor.dtype}, expected {name} as {dtype}"
            with clock("convert"):
                raw = tensor.reshape(-1).view(torch.uint8)
                if buffer is None:
                    buffer = (new_buffer or _new_buffer)(largest, raw.device)
                buffer[at : at + raw.numel()].copy_(raw)
            at += raw.numel()
        assert buffer is not None and at == _total(names, sizes), f"a bucket was filled with {at} bytes"
        yield Bucket(names, shapes, dtype, buffer[:at], i == len(plan) - 1)


def _new_buffer(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _total(names: Iterable[str], sizes: Sizes) -> int:
    return sum(num_bytes(*sizes[name]) for name in names)
