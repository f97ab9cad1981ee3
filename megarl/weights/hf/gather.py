"""Gathers the shards of one copy of the model into a stream of whole tensors with HF names.

A copy of the model is one data-parallel replica, or several if its experts are distributed over several.  Its ranks
process the same table in the same order; shapes come from the table, so no names or shapes are sent.  Consecutive
parameters of the same owners share a buffer.  Each buffer takes one broadcast over the pipeline stages, for experts
another from the expert-parallel rank that has them, and one all-gather over the ranks that each hold a part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.mcore.models.biases import router_biases
from megarl.mcore.models.lora import adapted, merged_weight, settings_of
from megarl.mcore.models.model import Model, unwrap, whole_name
from megarl.mcore.models.transformer_engine import local_name
from megarl.weights.clock import Clock
from megarl.weights.mapping.mtp import MTP_PREFIX
from megarl.weights.mapping.names import Op, ShardCoordinate, num_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ModelParallel:
    """This rank's place in its copy of the model, and the groups over which the copy is gathered."""

    coordinate: ShardCoordinate = ShardCoordinate()
    pp_rank: int = 0
    pp_size: int = 1
    tp_group: Any = None
    pp_group: Any = None
    ep_group: Any = None
    etp_group: Any = None

    @classmethod
    def current(cls) -> ModelParallel:
        tp, pp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
        ep, etp = parallel_state.get_expert_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
        coordinate = ShardCoordinate(tp.rank(), tp.size(), ep.rank(), ep.size(), etp.rank(), etp.size())
        return cls(coordinate, pp.rank(), pp.size(), tp, pp, ep, etp)


@dataclass(frozen=True)
class Owner:
    """The ranks that have a parameter: those of one stage, and for an expert those of one expert-parallel rank."""

    stage: int
    ep_rank: int | None  # None: not of a single expert
    axis: str  # the ranks over which it is cut, as in `Op`
    dtype: torch.dtype


@dataclass(frozen=True)
class Run:
    """Consecutive parameters of one owner that are sent in one buffer."""

    ops: tuple[Op, ...]
    owner: Owner


def local_parameters(model: Model) -> Mapping[str, Tensor]:
    """Parameters of this rank, and its routers' biases, under the names of the whole model.

    In these names layers and experts are numbered over all ranks.  They are the names of Megatron's layers without
    Transformer Engine, in which every expert is a module of its own.  Looking up an adapted weight merges its adapters.
    """
    out: dict[str, Tensor] = {}
    for gpt in map(unwrap, model):
        for name, param in chain(gpt.named_parameters(), router_biases(gpt)):
            whole = whole_name(gpt, local_name(name))
            assert whole not in out, f"two parameters of this rank are named {whole}"
            out[whole] = param.detach()
    return out if settings_of(model) is None else Merged(out, model)


class Merged(Mapping[str, Tensor]):
    """Parameters of this rank by their names in the whole model, without those of the adapters.

    A look-up of an adapted weight makes a new tensor, base + scaling * B A rounded once to the base's type: peak extra
    memory is what the caller holds at a time.  Read only: writes into such a tensor are lost.
    """

    def __init__(self, params: Mapping[str, Tensor], model: Model) -> None:
        """`params`: all parameters, including the adapters'."""
        linears = dict(adapted(model))
        self._linears: dict[str, Any] = {f"{path}.weight": linear for path, linear in linears.items()}
        inside = tuple(f"{path}.lora." for path in linears)
        self._base = {name: param for name, param in params.items() if not name.startswith(inside)}

    def __getitem__(self, name: str) -> Tensor:
        return merged_weight(self._linears[name]) if name in self._linears else self._base[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)

    def __contains__(self, name: object) -> bool:
        return name in self._base

    def dtype(self, name: str) -> torch.dtype:
        return self._base[name].dtype


def dtype_of(params: Mapping[str, Tensor], name: str) -> torch.dtype:
    """The type of a parameter, without merging it."""
    return params.dtype(name) if isinstance(params, Merged) else params[name].dtype


@contextmanager
def to_its_end(stream: Iterator[tuple[str, Tensor]]) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Iterate a stream to its end after an error too (e.g. a full disk): the other ranks wait in its collectives."""
    try:
        yield stream
    finally:
        deque(stream, maxlen=0)


def whole_tensors(
    table: Sequence[Op],
    params: Mapping[str, Tensor],
    where: ModelParallel,
    *,
    buffer_bytes: int,
    clock: Clock | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor) of every parameter on every rank of the copy: a collective, to be iterated to the end.

    A tensor is valid until the next one is requested.  Peak extra memory: about twice the larger of `buffer_bytes` and
    the largest parameter (of experts: of one expert).  `clock` counts the seconds of mapping as `convert`.
    """
    clock = clock or Clock()
    for run in _runs(table, _owners(table, params, where), where.coordinate, buffer_bytes):
        shards = _exchange(run, params, where)
        for i, op in enumerate(run.ops):
            with clock("convert"):
                tensors = op.to_hf([shard[i] for shard in (shards if op.is_sharded else shards[:1])])
            yield from tensors.items()


def owner_dtypes(table: Sequence[Op], params: Mapping[str, Tensor], where: ModelParallel) -> list[torch.dtype]:
    """The type of each parameter of the table, the same on every rank of the copy; a collective."""
    return [owner.dtype for owner in _owners(table, params, where)]


def _owners(table: Sequence[Op], params: Mapping[str, Tensor], where: ModelParallel) -> list[Owner]:
    """The owner of each parameter, by small all-reduces: a rank knows neither other stages' types nor other experts."""
    known = {name for op in table for name in (op.param, *op.copies)}
    unknown = sorted(name for name in set(params) - known if not name.startswith(MTP_PREFIX))  # servers get none
    assert not unknown, f"the table has no mapping for {', '.join(unknown)}"
    codes = [
        where.pp_rank * len(DTYPES) + DTYPES.index(dtype_of(params, op.param)) if op.param in params else -1
        for op in table
    ]
    device = next(iter(params.values())).device
    for group, size in ((where.pp_group, where.pp_size), (where.ep_group, where.coordinate.ep)):
        if size > 1:
            found = torch.tensor(codes, device=device)
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
            codes = found.tolist()
    assert not (absent := [op.param for op, c in zip(table, codes, strict=True) if c < 0]), f"nobody holds {absent}"
    return [
        Owner(code // len(DTYPES), _ep_rank(op, where.coordinate), op.axis, DTYPES[code % len(DTYPES)])
        for op, code in zip(table, codes, strict=True)
    ]


def _ep_rank(op: Op, coordinate: ShardCoordinate) -> int | None:
    if op.expert is None:
        return None
    number, count = op.expert
    return number // (count // coordinate.ep)  # as in `Op.held_by`


def _runs(
    table: Sequence[Op], owners: Sequence[Owner], coordinate: ShardCoordinate, buffer_bytes: int
) -> Iterator[Run]:
    ops: list[Op] = []
    filled, current = 0, owners[0]
    for op, owner in zip(table, owners, strict=True):
        size = num_bytes(op.shape_at(coordinate), owner.dtype) * op.cut(coordinate)[1]
        if ops and (owner != current or filled + size > buffer_bytes):
            yield Run(tuple(ops), current)
            ops, filled = [], 0
        ops.append(op)
        filled, current = filled + size, owner
    yield Run(tuple(ops), current)


def _exchange(run: Run, params: Mapping[str, Tensor], where: ModelParallel) -> list[list[Tensor]]:
    """Shards of the run's parameters: [rank of the axis][op]; unsharded parameters are the same on every rank."""
    owner, coordinate = run.owner, where.coordinate
    num_parts = run.ops[0].cut(coordinate)[1]
    is_expert_rank = owner.ep_rank in (None, coordinate.ep_rank)
    mine = [params[op.param] for op in run.ops] if is_expert_rank and where.pp_rank == owner.stage else []
    from_expert_rank = owner.ep_rank is not None and coordinate.ep > 1
    if num_parts == where.pp_size == 1 and not from_expert_rank:
        return [mine]
    sizes = [torch.Size(op.shape_at(coordinate)).numel() for op in run.ops]
    if mine:
        buffer = torch.cat([p.reshape(-1) for p in mine]) if len(mine) > 1 else mine[0].reshape(-1)
    else:
        buffer = torch.empty(sum(sizes), dtype=owner.dtype, device=next(iter(params.values())).device)
    raw = buffer.view(torch.uint8)  # bytes: any type over any backend
    if where.pp_size > 1 and is_expert_rank:
        dist.broadcast(raw, group=where.pp_group, group_src=owner.stage)
    if from_expert_rank:
        dist.broadcast(raw, group=where.ep_group, group_src=owner.ep_rank)
    gathered = [buffer]
    if num_parts > 1 and any(op.is_sharded for op in run.ops):
        parts = [torch.empty_like(raw) for _ in range(num_parts)]
        dist.all_gather(parts, raw, group=where.tp_group if owner.axis == "tp" else where.etp_group)
        gathered = [part.view(owner.dtype) for part in parts]
    return [
        [x.view(op.shape_at(coordinate)) for x, op in zip(part.split(sizes), run.ops, strict=True)] for part in gathered
    ]
