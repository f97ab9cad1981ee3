"""Mappings: how one parameter of a rank is composed of tensors with Hugging Face (HF) names, for both directions.

A mapping lists pieces: runs of rows (or columns) that are both in an HF tensor and in the shard of one rank.  Copying
the pieces one way loads a shard, copying them the other way exports it, and transfer plans read from them which slice
of which tensor a rank owns.  The same mappings describe trainers and servers.  Parameter names contain the layer and
expert numbers of the whole model, not of the part that a rank holds.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:  # the planner reads the tables without torch
    import torch
    from torch import Tensor

Shape = tuple[int, ...]
Sizes = Mapping[str, tuple[Shape, "torch.dtype"]]  # HF name -> shape and type, in the order of export
Axis = Literal["tp", "etp", "attn"]  # the ranks over which a parameter is cut: see ShardCoordinate


@dataclass(frozen=True)
class ShardCoordinate:
    """The position of a rank among the ranks over which the weights of one layer are cut.

    Dense parameters are cut over `tp` ranks.  Experts are distributed over `ep` ranks, each is cut over `etp` ranks.
    A server with attention data parallelism cuts attention and the vocabulary over groups of `attn` ranks only.
    """

    tp_rank: int = 0
    tp: int = 1
    ep_rank: int = 0
    ep: int = 1
    etp_rank: int = 0
    etp: int = 1
    attn_rank: int = 0
    attn: int = 1


@dataclass(frozen=True)
class Piece:
    """Example: Piece("k_proj.weight", 0, 16, 48, 16): rows 16-31 of k_proj are rows 48-63 of the shard."""

    hf_name: str
    dim: int  # 0 rows, 1 columns
    hf_start: int
    shard_start: int
    length: int
    index: int | None = None  # in a shard that stacks several experts' tensors: the index of the expert

    def of_hf(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self.dim, self.hf_start, self.length)

    def of_shard(self, shard: Tensor) -> Tensor:
        return (shard if self.index is None else shard[self.index]).narrow(self.dim, self.shard_start, self.length)


@dataclass(frozen=True)
class Op(ABC):
    """One parameter and the HF tensors it is composed of; subclasses define where the pieces are."""

    param: str  # e.g. decoder.layers.3.mlp.linear_fc1.weight
    copies: tuple[str, ...] = field(default=(), kw_only=True)  # parameters with the same content on other stages
    axis: Axis = field(default="tp", kw_only=True)  # the ranks over which the parameter is cut
    expert: tuple[int, int] | None = field(default=None, kw_only=True)  # (number, count); None: not of a single expert
    own_dtype: str | None = field(default=None, kw_only=True)  # torch's name of a type that is not that of the weights
    # Whether it is float32 in the trainer, in exports and in servers, whatever type the weights have.
    keeps_dtype: bool = field(default=False, kw_only=True)
    added: float = field(default=0.0, kw_only=True)  # to each number: a server's copy of a weight that it derives

    required = True  # an HF folder without these tensors is refused

    @property
    def is_sharded(self) -> bool:
        """False if every tensor-parallel rank holds the whole parameter."""
        return True

    @property
    def layer(self) -> int | None:
        """The number of its transformer layer in the whole model; None if it belongs to no layer."""
        found = re.match(r"(?:decoder|model|backbone)\.layers\.(\d+)\.", self.param)
        return int(found[1]) if found else None

    def moved(self, prefixes: Mapping[str, str]) -> Op:
        """The same with other names: each that begins with a key of `prefixes` begins with its value."""
        return replace(self, **{part.name: _moved(getattr(self, part.name), prefixes) for part in fields(self)})

    def cut(self, coordinate: ShardCoordinate) -> tuple[int, int]:
        """(rank, size) of `coordinate` along the axis over which this parameter is cut."""
        c = coordinate
        return {"tp": (c.tp_rank, c.tp), "etp": (c.etp_rank, c.etp), "attn": (c.attn_rank, c.attn)}[self.axis]

    def held_by(self, coordinate: ShardCoordinate) -> bool:
        """Whether a rank at `coordinate` holds this parameter; each expert-parallel rank has a run of the experts."""
        if self.expert is None:
            return True
        number, count = self.expert
        if count % coordinate.ep:
            raise ValueError(
                f"{self.param}: {count} experts do not divide by expert_model_parallel_size={coordinate.ep}"
            )
        return number // (count // coordinate.ep) == coordinate.ep_rank

    def pieces_at(self, coordinate: ShardCoordinate) -> list[Piece]:
        """The pieces that the rank at `coordinate` owns; none if the expert is another rank's."""
        return self.pieces(*self.cut(coordinate)) if self.held_by(coordinate) else []

    def shape_at(self, coordinate: ShardCoordinate) -> Shape:
        """The shape of the parameter at `coordinate`, which must hold it."""
        return self.shard_shape(self.cut(coordinate)[1])

    @property
    @abstractmethod
    def hf_shapes(self) -> dict[str, Shape]:
        """HF names and their global shapes, in the order in which they are exported."""

    @abstractmethod
    def shard_shape(self, tp_size: int) -> Shape:
        """The shape that every rank holds."""

    @abstractmethod
    def pieces(self, tp_rank: int, tp_size: int) -> list[Piece]:
        """The pieces that rank `tp_rank` owns; shard rows in no piece are padding."""

    def to_hf(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        """The shards of all tensor-parallel ranks (a single one if not sharded) -> whole HF tensors, contiguous.

        The tensors share the first shard's memory if each of them is one contiguous part of it.
        """
        tp_size = len(shards)
        whole = self._alias(shards[0]) if tp_size == 1 or not self.is_sharded else None
        if whole is not None:
            return whole
        out = {name: shards[0].new_empty(shape) for name, shape in self.hf_shapes.items()}
        for rank, shard in enumerate(shards):
            assert shard.shape == self.shard_shape(tp_size), f"{self.param}: shard {rank} is {tuple(shard.shape)}"
            for piece in self.pieces(rank, tp_size):
                piece.of_hf(out[piece.hf_name]).copy_(piece.of_shard(shard))
        return out

    def _alias(self, shard: Tensor) -> dict[str, Tensor] | None:
        """Views of a shard if each HF tensor is one run of rows in it, else None."""
        pieces, shapes = self.pieces(0, 1), self.hf_shapes
        if len(pieces) != len(shapes) or not shard.is_contiguous():
            return None
        return {p.hf_name: p.of_shard(shard) for p in pieces}

    def _share(self, size: int, tp_size: int) -> int:
        if size % tp_size:
            raise ValueError(f"{self.param}: its size {size} does not divide by tensor_model_parallel_size={tp_size}")
        return size // tp_size


@dataclass(frozen=True)
class Rename(Op):
    """The same tensor under another name, cut along `dim`, or whole on every rank (dim None)."""

    hf_name: str
    shape: Shape
    dim: int | None = None

    @property
    def is_sharded(self) -> bool:
        return self.dim is not None

    @property
    def hf_shapes(self) -> dict[str, Shape]:
        return {self.hf_name: self.shape}

    def shard_shape(self, tp_size: int) -> Shape:
        if self.dim is None:
            return self.shape
        return tuple(self._share(n, tp_size) if d == self.dim else n for d, n in enumerate(self.shape))

    def pieces(self, tp_rank: int, tp_size: int) -> list[Piece]:
        if self.dim is None:
            return [Piece(self.hf_name, 0, 0, 0, self.shape[0])]
        n = self._share(self.shape[self.dim], tp_size)
        return [Piece(self.hf_name, self.dim, tp_rank * n, 0, n)]


@dataclass(frozen=True)
class QKV(Op):
    """q, k, v <-> linear_qkv: for each key-value group the q heads of the group, then its k, then its v.

    Example, 4 heads in 2 groups: rows q0 q1 k0 v0 | q2 q3 k1 v1; a rank holds a run of these rows.
    `hidden` is None for the bias.
    """

    q: str
    k: str
    v: str
    num_heads: int
    num_groups: int
    head_dim: int
    hidden: int | None

    @property
    def hf_shapes(self) -> dict[str, Shape]:
        q, kv = self._shape(self.num_heads * self.head_dim), self._shape(self.num_groups * self.head_dim)
        return {self.q: q, self.k: kv, self.v: kv}

    def shard_shape(self, tp_size: int) -> Shape:
        rows = (self.num_heads + 2 * self.num_groups) * self.head_dim
        return self._shape(self._share(rows, tp_size))

    def pieces(self, tp_rank: int, tp_size: int) -> list[Piece]:
        rows = self.shard_shape(tp_size)[0]
        return list(_cut(self._runs(), tp_rank * rows, (tp_rank + 1) * rows))

    def _shape(self, rows: int) -> Shape:
        return (rows,) if self.hidden is None else (rows, self.hidden)

    def _runs(self) -> Iterator[Piece]:
        """The whole parameter in the order of its rows."""
        q_rows, at = self.num_heads // self.num_groups * self.head_dim, 0
        for group in range(self.num_groups):
            for name, rows in ((self.q, q_rows), (self.k, self.head_dim), (self.v, self.head_dim)):
                yield Piece(name, 0, group * rows, at, rows)
                at += rows


@dataclass(frozen=True)
class GatedQKV(QKV):
    """The same where q has for each head the rows of the query, then those of its gate.

    Example, 2 heads in 1 group: q0 g0 q1 g1 of the folder's q_proj, k0, v0 <-> q0 q1 g0 g1 k0 v0.
    """

    @property
    def hf_shapes(self) -> dict[str, Shape]:
        q, kv = self._shape(2 * self.num_heads * self.head_dim), self._shape(self.num_groups * self.head_dim)
        return {self.q: q, self.k: kv, self.v: kv}

    def shard_shape(self, tp_size: int) -> Shape:
        return self._shape(self._share(2 * (self.num_heads + self.num_groups) * self.head_dim, tp_size))

    def _runs(self) -> Iterator[Piece]:
        rows, at = self.head_dim, 0
        of_group = self.num_heads // self.num_groups
        for group in range(self.num_groups):
            heads = range(group * of_group, (group + 1) * of_group)
            parts = [(self.q, 2 * head) for head in heads] + [(self.q, 2 * head + 1) for head in heads]
            for name, place in (*parts, (self.k, group), (self.v, group)):
                yield Piece(name, 0, place * rows, at, rows)
                at += rows


class HeadRows(NamedTuple):
    """Rows of an HF tensor that belong to heads: `rows` of each of `heads`, `step` rows apart, from row `first` on.

    A plain tuple, once it was sent as JSON.
    """

    name: str
    heads: int
    rows: int
    step: int
    first: int


@dataclass(frozen=True)
class ByHeads(Op):
    """Rows of one or several HF tensors, cut by heads: a rank has those of its heads of the first part, then of the
    second, and so on.  Example: the input projection of a gated delta net (q, k, v, z, beta, alpha).

    `shapes`: of the HF tensors; `rest`: the parameter's shape behind its rows.
    """

    parts: tuple[HeadRows, ...]
    shapes: tuple[tuple[str, Shape], ...]
    rest: Shape

    @property
    def hf_shapes(self) -> dict[str, Shape]:
        return dict(self.shapes)

    def shard_shape(self, tp_size: int) -> Shape:
        return (sum(self._share(heads, tp_size) * rows for _, heads, rows, *_ in self.parts), *self.rest)

    def pieces(self, tp_rank: int, tp_size: int) -> list[Piece]:
        found, at = list[Piece](), 0
        for name, heads, rows, step, first in self.parts:
            own = self._share(heads, tp_size)
            # Heads that follow each other are one piece.
            runs = [(0, own * rows)] if step == rows else [(head * step, rows) for head in range(own)]
            for start, length in runs:
                found.append(Piece(name, 0, first + tp_rank * own * step + start, at, length))
                at += length
        return found


@dataclass(frozen=True)
class GateUp(Op):
    """gate_proj, up_proj <-> linear_fc1: every rank holds its rows of gate over its rows of up.

    `hidden` is None for the bias.
    """

    gate: str
    up: str
    ffn: int
    hidden: int | None

    @property
    def hf_shapes(self) -> dict[str, Shape]:
        return {self.gate: self._shape(self.ffn), self.up: self._shape(self.ffn)}

    def shard_shape(self, tp_size: int) -> Shape:
        return self._shape(2 * self._share(self.ffn, tp_size))

    def pieces(self, tp_rank: int, tp_size: int) -> list[Piece]:
        n = self._share(self.ffn, tp_size)
        return [Piece(self.gate, 0, tp_rank * n, 0, n), Piece(self.up, 0, tp_rank * n, n, n)]

    def _shape(self, rows: int) -> Shape:
        return (rows,) if self.hidden is None else (rows, self.hidden)


@dataclass(frozen=True)
class Vocab(Op):
    """The rows of the vocabulary, padded with zeros at the end so that every rank holds a multiple of `multiple`."""

    hf_name: str
    vocab_size: int
    hidden: int
    multiple: int = 1

    @property
    def hf_shapes(self) -> dict[str, Shape]:
        return {self.hf_name: (self.vocab_size, self.hidden)}

    def shard_shape(self, tp_size: int) -> Shape:
        unit = self.multiple * tp_size
        return (-(-self.vocab_size // unit) * self.multiple, self.hidden)

    def pieces(self, tp_rank: int, tp_size: int) -> list[Piece]:
        rows = self.shard_shape(tp_size)[0]
        start, stop = tp_rank * rows, min((tp_rank + 1) * rows, self.vocab_size)
        return [Piece(self.hf_name, 0, start, 0, stop - start)] if stop > start else []


@dataclass(frozen=True)
class ValueHead(Rename):
    """The critic's head [1, hidden], whole on every rank; if a folder has none, the model keeps its initial values."""

    required = False


def _moved(value: Any, prefixes: Mapping[str, str]) -> Any:
    """Of a name, or of all names in nested tuples."""
    if isinstance(value, tuple):
        parts = [_moved(part, prefixes) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    found = [old for old in prefixes if isinstance(value, str) and value.startswith(old)]
    return prefixes[found[0]] + value.removeprefix(found[0]) if found else value


def _cut(runs: Iterator[Piece], start: int, stop: int) -> Iterator[Piece]:
    """The parts of `runs` whose rows of the whole parameter are in [start, stop), as pieces of that shard."""
    for run in runs:
        first, last = max(run.shard_start, start), min(run.shard_start + run.length, stop)
        if first < last:
            inside = first - run.shard_start
            yield Piece(run.hf_name, run.dim, run.hf_start + inside, first - start, last - first)


def some_names(names: Sequence[str], at_most: int = 8) -> str:
    """Names for an error message: the first few, and how many more there are."""
    rest = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + rest


def num_bytes(shape: Shape, dtype: torch.dtype) -> int:
    return prod(shape) * dtype.itemsize
