"""Buckets: consecutive tensors of one dtype that are sent together, up to a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.arch.buckets import SMALLEST_PAIR, bucket_bytes_of
from megarl.weights.clock import Clock
from megarl.weights.mapping.names import Shape, Sizes, num_bytes

NewBuffer = Callable[[int, torch.device], Tensor]

_FREE_SHARE = 0.1  # of a GPU's free memory: the most that two buckets take


@dataclass(frozen=True)
class Bucket:
    """One message: the bytes of its tensors one after another, in row-major order.

    Example: names ["a", "b"], shapes [(2,), (3,)], float32: `data` holds 20 bytes, of which a has the first 8.
    """

    names: list[str]
    shapes: list[Shape]
    dtype: torch.dtype
    data: Tensor  # [bytes] uint8; valid until the bucket after the next one is filled
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
    """The tensors of `stream`, in the order of `sizes`, as buckets of which two exist at a time.

    So one can be filled while the one before is on its way; its receivers must have released it before the bucket
    after the next one is requested.  `new_buffer` makes memory for a bucket: [bytes] uint8 on the given device,
    ordinary memory by default.  `clock` counts the seconds in which `stream` gathers a tensor (gather), and in which
    tensors are copied into the bucket (convert).
    """
    clock, plan = clock or Clock(), plan_buckets(sizes, bucket_bytes)
    buffers = _Buffers([_total(names, sizes) for names in plan], bucket_bytes, new_buffer or _new_buffer)
    for i, names in enumerate(plan):
        shapes, dtype = [sizes[n][0] for n in names], sizes[names[0]][1]
        buffer: Tensor | None = None
        at = 0
        for name in names:
            with clock("gather"):
                got, tensor = next(stream)
            assert (got, tensor.dtype) == (name, dtype), f"got {got} as {tensor.dtype}, expected {name} as {dtype}"
            with clock("convert"):
                raw = tensor.reshape(-1).view(torch.uint8)
                if buffer is None:
                    buffer = buffers.take(i, raw.device)
                buffer[at : at + raw.numel()].copy_(raw)
            at += raw.numel()
        assert buffer is not None and at == buffers.sizes[i], f"a bucket was filled with {at} bytes"
        yield Bucket(names, shapes, dtype, buffer[:at], i == len(plan) - 1)


class _Buffers:
    """The memory of buckets.  On a CPU two buffers are used in turn.

    On a GPU each bucket has memory of its own, because torch does not reuse memory that another process has mapped
    before that process has released it and its GPU has finished reading.  (A server answers when its first rank has.)
    """

    def __init__(self, sizes: Sequence[int], bucket_bytes: int, new: NewBuffer) -> None:
        self.sizes = sizes
        self._bucket_bytes = bucket_bytes
        self._new = new
        self._in_turn: dict[int, Tensor] = {}

    def take(self, i: int, device: torch.device) -> Tensor:
        """Memory for bucket `i`."""
        if device.type == "cuda":
            torch.cuda.ipc_collect()  # returns what was released to torch's allocator
            return self._new(max(self.sizes[i], min(self._bucket_bytes, max(self.sizes))), device)
        if i % 2 not in self._in_turn:
            self._in_turn[i % 2] = self._new(max(self.sizes[i % 2 :: 2]), device)
        return self._in_turn[i % 2]


def _new_buffer(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def bucket_bytes_for(sizes: Sizes) -> int:
    """Bytes of the two buckets of a push, the same on all ranks: limited by the GPU with the least free memory.

    A collective on GPUs.
    """
    found = bucket_bytes_of(_total(sizes, sizes))
    if torch.cuda.is_available():
        free = torch.tensor(torch.cuda.mem_get_info()[0], device="cuda")
        dist.all_reduce(free, op=dist.ReduceOp.MIN)
        found = max(SMALLEST_PAIR, min(found, int(_FREE_SHARE * free)))
    return found


def _total(names: Iterable[str], sizes: Sizes) -> int:
    return sum(num_bytes(*sizes[name]) for name in names)
