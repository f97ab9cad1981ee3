"""How a model is sharded over ranks, computed from a table of parameters and the sizes of the layout.

There are two layouts: a trainer's ranks (`MegatronSharding`) and a server's (`ServerSharding`).

A rank's number gives its coordinate and its pipeline stage, and so which box of which HF tensor each of its parameters
holds.  Data and context parallelism and the sharded optimizer do not cut weights: they only add ranks that hold the
same.  Padding rows of a parameter belong to no HF tensor: a plan neither sends nor writes them, and they keep the zeros
with which the model was made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from megarl.arch.boxes import Box
from megarl.weights.mapping.names import Op, Piece, Shape, ShardCoordinate
from megarl.weights.mapping.server_map import coordinates


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """The place of a box in a rank's parameters: in `param` (or `param[index]` if experts are stacked) at `start`."""

    param: str
    index: int | None
    start: Shape


class Holding(NamedTuple):
    """A box of an HF tensor, and all ranks that have it, at the same place in the same parameter."""

    box: Box
    param_slice: ParameterSlice
    ranks: tuple[int, ...]


class HFTensor(NamedTuple):
    shape: Shape
    dtype: str
    ops: list[Op]  # the parameters that hold parts of it: one, unless tied output rows are held as a separate parameter


Groups = dict[
    int, list[tuple[ShardCoordinate, tuple[int, ...]]]
]  # expert-parallel rank -> distinct coordinates, and the ranks at each


@dataclass(frozen=True)
class Sharding(ABC):
    """`dtypes`: (parameter, type) where the type is not `dtype`; types have torch's names ("float32")."""

    table: tuple[Op, ...]
    dtype: str = field(default="bfloat16", kw_only=True)
    dtypes: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)

    @property
    @abstractmethod
    def num_ranks(self) -> int: ...

    @property
    @abstractmethod
    def num_stages(self) -> int: ...

    @abstractmethod
    def coordinate(self, rank: int) -> ShardCoordinate: ...

    @abstractmethod
    def stage(self, rank: int) -> int: ...

    @abstractmethod
    def params_on(self, op: Op, stage: int) -> tuple[str, ...]:
        """The names of the parameter on ranks of a stage (for an expert's: on the ranks that hold this expert)."""

    @cached_property
    def tensors(self) -> dict[str, HFTensor]:
        """Every HF tensor of the model, in the order of the table."""
        found: dict[str, HFTensor] = {}
        types = dict(self.dtypes)
        for op in self.table:
            dtype = types.get(op.param, self.dtype)
            for name, shape in op.hf_shapes.items():
                known = found.setdefault(name, HFTensor(shape, dtype, []))
                if known[:2] != (shape, dtype):
                    raise ValueError(
                        f"{name} is {known.dtype}{list(known.shape)} and, by {op.param}, {dtype}{list(shape)}"
                    )
                known.ops.append(op)
        return found

    def owned(self, rank: int) -> dict[str, list[tuple[Box, ParameterSlice]]]:
        """HF name -> the boxes that a rank has of it, and their places in its parameters; in the order of the table."""
        coordinate, stage = self.coordinate(rank), self.stage(rank)
        found: dict[str, list[tuple[Box, ParameterSlice]]] = defaultdict(list)
        for op in self.table:
            if params := self.params_on(op, stage):
                shapes = op.hf_shapes if (pieces := op.pieces_at(coordinate)) else {}
                for piece in pieces:
                    box, index, start = _locate(piece, shapes[piece.hf_name])
                    found[piece.hf_name] += [(box, ParameterSlice(param, index, start)) for param in params]
        return found

    def shapes(self, rank: int) -> dict[str, tuple[Shape, str]]:
        """Shape and type of every parameter of the table that a rank has, padding included."""
        coordinate = self.coordinate(rank)
        stage = self.stage(rank)
        types = dict(self.dtypes)
        return {
            param: (op.shape_at(coordinate), types.get(op.param, self.dtype))
            for op in self.table
            for param in self.params_on(op, stage)
            if op.held_by(coordinate)
        }

    def holdings(self, names: Collection[str]) -> dict[str, list[Holding]]:
        """For each of these HF tensors: its boxes, and the ranks that have them."""
        found: dict[str, list[Holding]] = {name: [] for name in names}
        for op in {op.param: op for name in names for op in self.tensors[name].ops}.values():
            shapes = op.hf_shapes
            for stage in range(self.num_stages):
                for param in self.params_on(op, stage):
                    for coordinate, ranks in self.groups(op, stage):
                        for piece in op.pieces_at(coordinate):
                            if piece.hf_name in found:
                                box, index, start = _locate(piece, shapes[piece.hf_name])
                                found[piece.hf_name].append(Holding(box, ParameterSlice(param, index, start), ranks))
        return found

    def groups(self, op: Op, stage: int) -> list[tuple[ShardCoordinate, tuple[int, ...]]]:
        """The ranks of a stage that have the parameter, grouped by the slice they hold, with a coordinate per group."""
        by_expert = op.expert is not None or op.axis == "etp"
        key = (stage, op.axis, op.is_sharded, by_expert)
        if key not in self._groups:
            self._groups[key] = self._group(op, stage, by_expert)
        groups = self._groups[key]
        if op.expert is None:
            return [group for of_experts in groups.values() for group in of_experts]
        number, count = op.expert
        found = groups[number * len(groups) // count]
        assert op.held_by(found[0][0]), f"{op.param} is not where runs of experts dealt in order put it"
        return found

    def _group(self, op: Op, stage: int, by_expert: bool) -> Groups:
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for rank in range(self.num_ranks):
            if self.stage(rank) == stage:
                coordinate = self.coordinate(rank)
                found[coordinate.ep_rank if by_expert else 0, op.cut(coordinate)[0] if op.is_sharded else 0].append(
                    rank
                )
        groups: Groups = defaultdict(list)
        for (ep_rank, _), ranks in sorted(found.items()):
            groups[ep_rank].append((self.coordinate(ranks[0]), tuple(ranks)))
        return dict(groups)

    @cached_property
    def _groups(self) -> dict[tuple[int, str, bool, bool], Groups]:
        return {}


def _locate(piece: Piece, shape: Shape) -> tuple[Box, int | None, Shape]:
    """The piece as a box of its HF tensor, and where the box starts in the parameter: (box, index, start)."""
    return (
        _box(shape, piece.dim, piece.hf_start, piece.length),
        piece.index,
        _start(shape, piece.dim, piece.shard_start),
    )


@lru_cache(4096)  # the parameters of all layers and experts are cut in the same way
def _box(shape: Shape, dim: int, start: int, length: int) -> Box:
    return tuple((start, start + length) if d == dim else (0, n) for d, n in enumerate(shape))


@lru_cache(4096)
def _start(shape: Shape, dim: int, start: int) -> Shape:
    return tuple(start if d == dim else 0 for d in range(len(shape)))


@dataclass(frozen=True)
class MegatronSharding(Sharding):
    """The ranks of Megatron-Core's trainer in its default order (tp, cp, ep, dp, pp; experts: etp, ep, dp, pp).

    `etp` None: the same as `tp`.  `layers_per_chunk`: the number of layers of each of the pp * vpp chunks, in the order
    of the model; chunk i is on stage i % pp; () distributes layers evenly.  The embedding is on the first stage and its
    tied copy (`Op.copies`) on the last.  Other parameters that belong to no layer are on the last stage.
    """

    world_size: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    layers_per_chunk: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for what, size in (("tp*pp*cp", self.tp * self.pp * self.cp), ("etp*ep*pp", self._etp * self.ep * self.pp)):
            if self.world_size % size:
                raise ValueError(f"{what}={size} does not divide world_size={self.world_size}")
        if len(self._chunks) != self.pp * self.vpp or sum(self._chunks) != self.num_layers:
            raise ValueError(
                f"layers_per_chunk={list(self._chunks)}: expected {self.pp * self.vpp} numbers (pp*vpp) that sum to "
                "the "
                f"model's {self.num_layers} layers"
            )

    @property
    def num_ranks(self) -> int:
        return self.world_size

    @property
    def num_stages(self) -> int:
        return self.pp

    @cached_property
    def num_layers(self) -> int:
        return 1 + max((op.layer for op in self.table if op.layer is not None), default=-1)

    def coordinate(self, rank: int) -> ShardCoordinate:
        return ShardCoordinate(
            rank % self.tp, self.tp, rank // self._etp % self.ep, self.ep, rank % self._etp, self._etp
        )

    def stage(self, rank: int) -> int:
        return rank // (self.world_size // self.pp)

    def params_on(self, op: Op, stage: int) -> tuple[str, ...]:
        layer = self._layers[op.param]
        if layer is not None:
            return (op.param,) if self._stage_of_layer[layer] == stage else ()
        home = 0 if op.param.startswith("embedding.") else self.pp - 1
        if stage == home:
            return (op.param,)
        return op.copies if stage == self.pp - 1 else ()

    @property
    def _etp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @cached_property
    def _chunks(self) -> tuple[int, ...]:
        count = self.pp * self.vpp
        if not self.layers_per_chunk and self.num_layers % count:
            raise ValueError(f"{self.num_layers} layers do not divide by pp*vpp={count}; expected layers_per_chunk")
        return self.layers_per_chunk or (self.num_layers // count,) * count

    @cached_property
    def _layers(self) -> dict[str, int | None]:
        return {op.param: op.layer for op in self.table}

    @cached_property
    def _stage_of_layer(self) -> list[int]:
        ends = list(accumulate(self._chunks))
        return [bisect_right(ends, layer) % self.pp for layer in range(self.num_layers)]


@dataclass(frozen=True)
class ServerSharding(Sharding):
    """Replicas of a server, one after another, each of `tp` ranks in `ep` groups that share the experts, as in SGLang.

    Rank r of a replica has the r // (tp/ep)-th run of the experts, and the (r % (tp/ep))-th part of each.  It has the
    (r % (tp/attention_dp))-th part of attention and vocabulary, which each of the `attention_dp` groups has whole.
    """

    tp: int = 1
    ep: int = 1
    attention_dp: int = 1
    num_replicas: int = 1

    def __post_init__(self) -> None:
        for what, size in (("ep_size", self.ep), ("attention_dp", self.attention_dp)):
            if self.tp % size:
                raise ValueError(f"a server's {what}={size} does not divide its tp_size={self.tp}")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.num_replicas

    @property
    def num_stages(self) -> int:
        return 1

    def coordinate(self, rank: int) -> ShardCoordinate:
        return self._coordinates[rank % self.tp]

    def stage(self, rank: int) -> int:
        return 0

    def params_on(self, op: Op, stage: int) -> tuple[str, ...]:
        return (op.param,)

    @cached_property
    def _coordinates(self) -> list[ShardCoordinate]:
        return coordinates(self.tp, self.ep, self.attention_dp)
