"""Offloads a role's tensors to host memory between its calls, so that another role or a server can use its GPU.

Only memory moves, not tensor objects: a storage frees its bytes and later allocates the same size again.  So
parameters, views into Megatron's contiguous buffers and the optimizer's references all stay valid.

Parameters that were only read since they were onloaded are still in host memory and are not copied back: the caller
onloads `to_read` and calls `written` before it writes them.  Otherwise everything is copied.

What is needed late, such as moments, can be copied while the device computes.  Its memory is allocated at once, so the
peak is the same.  Offloading always waits, because the next role needs the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel, FullyShardedDataParallel
from torch import Tensor, nn

from megarl.mcore.models.model import Model
from megarl.mcore.training.host_memory import HostMemory, begin_copies, copy_at_once
from megarl.mcore.training.optimizer import Optimizer
from megarl.mcore.training.wrappers import fsdp_shards, gather_fsdp, release_fsdp

SMALL = 8  # bytes: step counters and the like stay


class Moved(NamedTuple):
    """Bytes that were offloaded from the device, and how many of them were copied to the host."""

    parameters: int
    gradients: int
    optimizer: int
    copied: int


class OffloadBuffer:
    """Host memory into which one role is offloaded.  It is reused as long as the sizes of the tensors stay."""

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer | None,
        *,
        parameters: bool = False,
        gradients: bool = False,
        moments: bool = False,
    ) -> None:
        """Select which parts of the role are offloaded.

        `gradients`: the gradient buffers, whose values are not kept.  `moments`: the optimizer's state, including its
        float32 master weights.
        """
        self.model, self.optimizer = model, optimizer
        self._parts, self.is_offloaded = (parameters, gradients, moments), False
        self._host = HostMemory(())  # a part for each storage in `_kept`
        self._kept: list[torch.UntypedStorage] = []
        self._same: dict[int, torch.UntypedStorage] = {}  # parameters that the host has as they are, by part
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []
        self._arrive: Callable[[], None] | None = None  # ends when what was onloaded is there

    def offload(self) -> Moved:
        """Copy to host memory and free the device's.  Does nothing if already offloaded."""
        if self.is_offloaded:
            return Moved(0, 0, 0, 0)
        self.wait()
        self.is_offloaded = True  # even if there is nothing yet: the first step creates the moments
        found = zip(self._storages(), self._parts, strict=True)
        weights, gradients, state = (part if chosen else [] for part, chosen in found)
        of_weights, of_gradients, of_state = (sum(x.nbytes() for x in part) for part in (weights, gradients, state))
        self._kept = [*weights, *state]
        self._emptied = [(x, x.nbytes()) for x in gradients]
        sizes, copied = tuple(x.nbytes() for x in self._kept), 0
        if self._host.sizes != sizes:
            self._host, self._same = HostMemory(()), {}  # frees the old memory before there is new
            self._host = HostMemory(sizes)
        for part, (storage, host) in enumerate(zip(self._kept, self._host.parts, strict=True)):
            if part not in self._same or self._same[part]._cdata != storage._cdata:
                host.copy_(_bytes(storage), non_blocking=True)
                copied += storage.nbytes()
        _wait()
        for storage in (*self._kept, *gradients):
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return Moved(of_weights, of_gradients, of_state, copied)

    def onload(self, *, to_read: bool = False, beside: bool = False) -> None:
        """Allocate device memory again and fill it, gradients with zeros.  Copies nothing if not offloaded.

        `to_read`: who writes parameters later calls `written`; until then they need no copy.  Buffers of modules, the
        optimizer's state and Megatron-FSDP's shards are always copied.
        `beside`: return while it is copied; who reads or writes any of it calls `wait` before.
        """
        if self.is_offloaded:
            self._fill(to_read=to_read, beside=beside)
        if not beside:
            self.wait()

    def wait(self) -> None:
        """Return when all that was onloaded is there."""
        if self._arrive is not None:
            self._arrive()
            self._arrive = None

    def _fill(self, *, to_read: bool, beside: bool) -> None:
        for storage, size in self._emptied:
            storage.resize_(size)
            _bytes(storage).zero_()
        kept = [*zip(self._kept, self._host.parts, strict=True)]
        for storage, host in kept:
            storage.resize_(host.numel())
        pairs = [(_bytes(storage), host) for storage, host in kept]
        if beside:
            self._arrive = begin_copies(pairs)
        else:  # not behind another buffer's moments, which may be under way
            copy_at_once(pairs)
        read = {x._cdata for x in self._parameters()} if to_read else set()
        self._same = {part: storage for part, storage in enumerate(self._kept) if storage._cdata in read}
        self._kept = []
        self._emptied = []
        self.is_offloaded = False

    def written(self) -> None:
        """Something writes, or may write, the parameters: the next `offload` copies all but the frozen ones."""
        trained = {x._cdata for x in self._parameters(trained=True)}
        self._same = {part: storage for part, storage in self._same.items() if storage._cdata not in trained}

    def _parameters(self, *, trained: bool = False) -> Iterator[torch.UntypedStorage]:
        chunks = [chunk for chunk in self.model if not isinstance(chunk, FullyShardedDataParallel)]
        found = (param for chunk in chunks for param in chunk.parameters())
        return _distinct([param for param in found if param.requires_grad or not trained], set())

    def _storages(self) -> tuple[list[torch.UntypedStorage], ...]:
        """Storages of weights, gradients and the optimizer, each once: a shared one counts as the first of these."""
        seen: set[int] = set()
        weights: list[Tensor] = []
        gradients: list[Tensor] = []
        for chunk in self.model:
            if isinstance(chunk, FullyShardedDataParallel):
                held, summed = fsdp_shards(chunk)
                weights += held
                gradients += summed
            weights += [*chunk.parameters(), *nn.Module.buffers(chunk)]  # DDP calls its own lists "buffers"
            gradients += [
                g for p in chunk.parameters() for g in (getattr(p, "main_grad", None), p.grad) if g is not None
            ]
        state = () if self.optimizer is None else _state_of(self.optimizer)
        return tuple([*_distinct(tensors, seen)] for tensors in (weights, gradients, state))


@contextmanager
def synchronized(model: Model) -> Iterator[None]:
    """Inside this context parameters can be read outside a forward pass; a collective if they are gathered late."""
    for chunk in model:
        if isinstance(chunk, FullyShardedDataParallel):
            gather_fsdp(chunk)
        elif isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)  # the last step left this to the next forward pass
    yield
    for chunk in model:
        if isinstance(chunk, FullyShardedDataParallel):
            release_fsdp(chunk)


def _state_of(optimizer: Optimizer) -> Iterator[Any]:
    """The tensors that the optimizer updates, and their state."""
    for part in optimizer.parts:
        if part.is_stub_optimizer:
            continue
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                yield param
                state = (x for x in part.optimizer.state[param].values() if isinstance(x, Tensor))
                yield from (x for x in state if x.device == param.device)  # an optimizer on the host has them there


def _distinct(tensors: Iterable[Any], seen: set[int]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()  # of a DTensor: this rank's shard
        if storage._cdata not in seen and storage.nbytes() > SMALL:
            seen.add(storage._cdata)
            yield storage


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """The storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
