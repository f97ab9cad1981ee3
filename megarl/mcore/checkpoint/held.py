"""What a rank holds of each tensor of the whole model: boxes of named tensors, as views of the rank's memory.

Megatron's `sharded_state_dict` says which part of which tensor a parameter is.  The distributed optimizer holds a run
of each flat parameter, which is cut into boxes of the same tensor.  So every layout writes the same tensors, in other
boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from megarl.arch.boxes import Box, Shape, box_at, box_shape, box_size, boxes_of
from megarl.mcore.models.lora import adapted, settings_of
from megarl.mcore.models.model import Model, unwrap
from megarl.mcore.models.transformer_engine import without_extra_state
from megarl.mcore.training.optimizer import Optimizer
from megarl.mcore.training.wrappers import FsdpOptimizer


@dataclass(frozen=True)
class Piece:
    """A box of a tensor of the whole model, and this rank's memory of it."""

    name: str
    whole: Shape  # of the tensor
    box: Box
    memory: Tensor  # of the box's shape
    may_end_early: bool = False  # it may have rows of padding, which another layout does not have


@dataclass(frozen=True)
class Part:
    """A contiguous part of one parameter of this rank, which is a box of one tensor of the whole model."""

    name: str
    whole: Shape
    offset: Shape
    shape: Shape
    start: int  # of the part's first element in the flat parameter
    memory: Tensor
    is_first: bool  # of the pipeline and tensor parallel ranks that hold the same values
    replica: int  # of the data-parallel ranks that hold the same weights
    may_end_early: bool

    def own_share(self) -> tuple[int, int]:
        """The elements that this rank writes if other ranks hold the same ones: equal shares over data parallelism."""
        if not self.is_first:
            return 0, 0
        count, number = math.prod(self.shape), _num_replicas(self.name)
        assert self.replica < number, f"{self.name}: replica {self.replica} of {number}"
        return count * self.replica // number, count * (self.replica + 1) // number

    def pieces(self, prefix: str, flat: Tensor, start: int, stop: int) -> Iterator[Piece]:
        """Elements [start, stop) of the part; `flat` begins with element `start`."""
        for first, part in boxes_of(self.shape, start, stop):
            box = tuple((at + begin, at + end) for at, (begin, end) in zip(self.offset, part, strict=True))
            run = flat[first - start : first - start + box_size(box)]
            yield Piece(prefix + self.name, self.whole, box, run.view(box_shape(box)), self.may_end_early)


def held_weights(model: Model, *, own: bool) -> Iterator[Piece]:
    """This rank's weights; `own`: only the share that it writes."""
    for part in (part for parts in _parts(model).values() for part in parts):
        start, stop = part.own_share() if own else (0, part.memory.numel())
        yield from part.pieces("", part.memory.view(-1)[start:stop], start, stop)


def held_optimizer(optimizer: Optimizer, model: Model, *, own: bool) -> Iterator[Piece]:
    """This rank's optimizer state: `optimizer.exp_avg.NAME` and so on, `optimizer.param.NAME` of master weights.

    The distributed optimizer's ranks hold different runs, of which each is written; of others each writes its share.
    """
    if isinstance(optimizer.inner, FsdpOptimizer):
        for name, tensor in optimizer.inner.own_parts():
            shape = tuple(tensor.shape)
            yield Piece(name, shape, box_at([0] * len(shape), shape), tensor)
        return
    parts = _parts(model)
    for param, start, stop, state in optimizer.runs():
        for part in parts[id(param)]:
            begin, end = max(start - part.start, 0), min(stop - part.start, math.prod(part.shape))
            if own and optimizer.is_distributed:
                end = end if part.is_first else begin
            elif own:
                begin, end = part.own_share()
            at = part.start - start
            for kind, tensor in state.items() if begin < end else ():
                yield from part.pieces(f"optimizer.{kind}.", tensor.view(-1)[begin + at : end + at], begin, end)


def _parts(model: Model) -> dict[int, list[Part]]:
    """The parts of each parameter and buffer, by its id."""
    has_adapters = settings_of(model) is not None
    found: dict[int, list[Part]] = {}
    for chunk in model:
        state = _sharded_adapters(chunk) if has_adapters else _sharded(chunk)
        for entry in nested_values(state):
            assert isinstance(entry, ShardedTensor | ShardedTensorFactory), f"{entry}: only tensors are saved"
            cut: Iterable[Any] = nested_values([entry.build()]) if isinstance(entry, ShardedTensorFactory) else [entry]
            found.setdefault(id(entry.data), []).extend(_part(shard, entry.data) for shard in cut)
    return found


def _sharded(chunk: nn.Module) -> dict[str, Any]:
    return without_extra_state(unwrap(chunk).sharded_state_dict())


def _sharded_adapters(chunk: nn.Module) -> dict[str, Any]:
    """The adapters for a checkpoint: {name in this chunk: sharded tensor under the name in the whole model}."""
    names = {id(param): name for name, param in unwrap(chunk).named_parameters()}
    dense, expert = ps.get_data_parallel_group(with_context_parallel=True), ps.get_expert_data_parallel_group()
    state: dict[str, Any] = {}
    for path, linear in adapted([chunk]):
        groups = {"dp_cp_group": expert if linear.is_expert else dense, "tp_group": linear.tp_group}
        for projection, low_rank in linear.lora.projections.items():
            for factor, param in low_rank.named_parameters():
                key, axis = f"{path}.lora.{projection}.{factor}", low_rank.cut[factor]
                if axis is None:
                    state[names[id(param)]] = make_sharded_tensor_for_checkpoint(param, key, **groups)
                else:
                    state[names[id(param)]] = make_tp_sharded_tensor_for_checkpoint(param, key, tp_axis=axis, **groups)
    return state


def _part(shard: ShardedTensor, param: Tensor) -> Part:
    """Layer and expert numbers, which Megatron prepends as dimensions, become a part of the name."""
    data, axes = shard.data, shard.prepend_axis_num
    assert data is not None
    assert data.is_contiguous(), f"{shard.key}: its part of {tuple(param.shape)} is not contiguous"
    assert data.untyped_storage().data_ptr() == param.untyped_storage().data_ptr(), f"{shard.key}: not a view"
    pipeline, tensor, replica = shard.replica_id
    numbers = "".join(f"[{i}]" for i in shard.global_offset[:axes])
    return Part(
        name=shard.key + numbers,
        whole=tuple(shard.global_shape[axes:]),
        offset=tuple(shard.global_offset[axes:]),
        shape=tuple(shard.local_shape),
        start=data.storage_offset() - param.storage_offset(),
        memory=data.detach(),
        is_first=pipeline == tensor == 0,
        replica=replica,
        may_end_early=shard.allow_shape_mismatch,
    )


def _num_replicas(name: str) -> int:
    """Data-parallel ranks that hold the same weights."""
    is_expert = ".experts." in name
    group = ps.get_expert_data_parallel_group() if is_expert else ps.get_data_parallel_group(with_context_parallel=True)
    return int(group.size())
