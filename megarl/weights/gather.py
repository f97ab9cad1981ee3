"""From the shards of one model replica to whole tensors with HF names, streamed.

The ranks of a replica run the same table in the same order; shapes come from the table, so no names or shapes travel.
Consecutive parameters of one pipeline stage share a buffer: one broadcast over the pipeline, one all-gather over tensor
parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megarl.mcore.model import unwrap
from megarl.weights.names import Op, num_bytes

Model = nn.Module | Sequence[nn.Module]  # this rank's part: one chunk, or several under virtual pipelining
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ModelParallel:
    """Where this rank stands in its replica, and the groups over which the replica is gathered."""

    tp_rank: int
    tp_size: int
    tp_group: Any
    pp_rank: int
    pp_size: int
    pp_group: Any

    @classmethod
    def current(cls) -> ModelParallel:
        tp, pp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
        return cls(tp.rank(), tp.size(), tp, pp.rank(), pp.size(), pp)


@dataclass(frozen=True)
class Run:
    """Consecutive parameters of one pipeline stage and one type that travel in one buffer."""

    ops: tuple[Op, ...]
    stage: int
    dtype: torch.dtype


def local_parameters(model: Model) -> dict[str, Tensor]:
    """Parameters of this rank under the names of the whole model: layers are numbered over all pipeline stages."""
    out: dict[str, Tensor] = {}
    for chunk in [model] if isinstance(model, nn.Module) else model:
        gpt = unwrap(chunk)
        numbers = [layer.layer_number - 1 for layer in gpt.decoder.layers]
        for name, param in gpt.named_parameters():
            whole_name = _renumber(name, numbers)
            assert whole_name not in out, f"two parameters of this rank are named {whole_name}"
            out[whole_name] = param.detach()
    return out


def _renumber(name: str, layer_numbers: Sequence[int]) -> str:
    return re.sub(r"^decoder\.layers\.(\d+)", lambda m: f"decoder.layers.{layer_numbers[int(m[1])]}", name)


def whole_tensors(
    table: Sequence[Op],
    params: Mapping[str, Tensor],
    where: ModelParallel,
    *,
    buffer_bytes: int,
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor) of every parameter on every rank of the replica: a collective that all must finish.

    A tensor is valid until the next one is asked for.  Peak extra memory: about twice the larger of `buffer_bytes` and
    the largest parameter.
    """
    for run in _runs(table, _owners(table, params, where), where.tp_size, buffer_bytes):
        shards = _exchange(run, params, where)
        for i, op in enumerate(run.ops):
            yield from op.to_hf([shards[rank][i] for rank in range(where.tp_size if op.is_sharded else 1)]).items()


def owner_dtypes(table: Sequence[Op], params: Mapping[str, Tensor], where: ModelParallel) -> list[torch.dtype]:
    """The type of each parameter of the table, the same answer on every rank of the replica; a collective."""
    return [dtype for _, dtype in _owners(table, params, where)]


def _owners(table: Sequence[Op], params: Mapping[str, Tensor], where: ModelParallel) -> list[tuple[int, torch.dtype]]:
    """(pipeline stage, type) of each parameter: one small all-reduce, as no stage knows the types of the others."""
    known = {name for op in table for name in (op.megatron, *op.copies)}
    assert not (unknown := sorted(set(params) - known)), f"the table has no mapping for {', '.join(unknown)}"
    codes = [
        where.pp_rank * len(DTYPES) + DTYPES.index(params[op.megatron].dtype) if op.megatron in params else -1
        for op in table
    ]
    if where.pp_size > 1:
        device = next(iter(params.values())).device
        found = torch.tensor(codes, device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=where.pp_group)
        codes = found.tolist()
    assert not (absent := [op.megatron for op, c in zip(table, codes, strict=True) if c < 0]), f"nobody holds {absent}"
    return [(code // len(DTYPES), DTYPES[code % len(DTYPES)]) for code in codes]


def _runs(
    table: Sequence[Op], owners: Sequence[tuple[int, torch.dtype]], tp_size: int, buffer_bytes: int
) -> Iterator[Run]:
    ops: list[Op] = []
    filled, current = 0, owners[0]
    for op, owner in zip(table, owners, strict=True):
        size = num_bytes(op.shard_shape(tp_size), owner[1]) * tp_size
        if ops and (owner != current or filled + size > buffer_bytes):
            yield Run(tuple(ops), *current)
            ops, filled = [], 0
        ops.append(op)
        filled, current = filled + size, owner
    yield Run(tuple(ops), *current)


def _exchange(run: Run, params: Mapping[str, Tensor], where: ModelParallel) -> list[list[Tensor]]:
    """Shards of the run's parameters: [tp rank][op]; what is not sharded is this rank's own at every tp rank."""
    mine = [params[op.megatron] for op in run.ops] if where.pp_rank == run.stage else []
    if where.tp_size == where.pp_size == 1:
        return [mine]
    sizes = [torch.Size(op.shard_shape(where.tp_size)).numel() for op in run.ops]
    device = next(iter(params.values())).device
    if mine:
        buffer = torch.cat([p.reshape(-1) for p in mine]) if len(mine) > 1 else mine[0].reshape(-1)
    else:
        buffer = torch.empty(sum(sizes), dtype=run.dtype, device=device)
    raw = buffer.view(torch.uint8)  # bytes: any type over any backend
    if where.pp_size > 1:
        dist.broadcast(raw, group=where.pp_group, group_src=run.stage)
    if where.tp_size == 1 or not any(op.is_sharded for op in run.ops):
        gathered = [buffer] * where.tp_size
    else:
        parts = [torch.empty_like(raw) for _ in range(where.tp_size)]
        dist.all_gather(parts, raw, group=where.tp_group)
        gathered = [part.view(run.dtype) for part in parts]
    return [
        [x.view(op.shard_shape(where.tp_size)) for x, op in zip(part.split(sizes), run.ops, strict=True)]
        for part in gathered
    ]
