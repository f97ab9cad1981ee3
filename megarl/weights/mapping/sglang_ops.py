"""SGLang's fused layers as mappings.  Its gate_up_proj is a `GateUp`; other layers are `Rename`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megarl.weights.mapping.names import QKV, Axis, Op, Piece, Shape, ShardCoordinate

VOCAB_PADDING = 64  # SGLang rounds the rows of the whole vocabulary up to a multiple of this


@dataclass(frozen=True)
class StackedQKV(QKV):
    """q, k, v -> qkv_proj: a rank's rows of q, then its rows of k, then those of v.

    With more ranks than key-value heads, each of these heads is held by several neighbouring ranks.
    Example, 8 heads in 2 groups on 4 ranks: rank 1 holds q2 q3 k0 v0, as rank 0 holds k0 and v0 too.
    `hidden` is None for the bias.
    """

    def shard_shape(self, tp_size: int) -> Shape:
        return self._shape((self._share(self.num_heads, tp_size) + 2 * self._kv_heads(tp_size)) * self.head_dim)

    def pieces(self, tp_rank: int, tp_size: int) -> list[Piece]:
        q_rows = self._share(self.num_heads, tp_size) * self.head_dim
        kv_rows = self._kv_heads(tp_size) * self.head_dim
        kv_start = tp_rank * self.num_groups // tp_size * self.head_dim
        return [
            Piece(self.q, 0, tp_rank * q_rows, 0, q_rows),
            Piece(self.k, 0, kv_start, q_rows, kv_rows),
            Piece(self.v, 0, kv_start, q_rows + kv_rows, kv_rows),
        ]

    def _kv_heads(self, tp_size: int) -> int:
        """Key-value heads of one rank."""
        if tp_size % self.num_groups and self.num_groups % tp_size:
            raise ValueError(
                f"{self.param}: {self.num_groups} key-value heads cannot be dealt to {tp_size} ranks; expected one "
                "number to divide the other"
            )
        return max(1, self.num_groups // tp_size)


@dataclass(frozen=True)
class KeyHeads(Op):
    """Rows of the key-value heads; with more ranks than heads, each head is held by several neighbouring ranks."""

    hf_name: str
    num_heads: int
    head_dim: int

    @property
    def hf_shapes(self) -> dict[str, Shape]:
        return {self.hf_name: (self.num_heads * self.head_dim,)}

    def shard_shape(self, tp_size: int) -> Shape:
        return (max(1, self.num_heads // tp_size) * self.head_dim,)

    def pieces(self, tp_rank: int, tp_size: int) -> list[Piece]:
        start = tp_rank * self.num_heads // tp_size * self.head_dim
        return [Piece(self.hf_name, 0, start, 0, *self.shard_shape(tp_size))]


@dataclass(frozen=True)
class StackedRows(Op):
    """Several tensors stacked by rows, q_a_proj above kv_a_proj_with_mqa; every rank holds all rows.

    `parts`: (HF name, rows) from top to bottom.
    """

    parts: tuple[tuple[str, int], ...]
    hidden: int

    @property
    def is_sharded(self) -> bool:
        return False

    @property
    def hf_shapes(self) -> dict[str, Shape]:
        return {name: (rows, self.hidden) for name, rows in self.parts}

    def shard_shape(self, tp_size: int) -> Shape:
        return (sum(rows for _, rows in self.parts), self.hidden)

    def pieces(self, tp_rank: int, tp_size: int) -> list[Piece]:
        found, at = [], 0
        for name, rows in self.parts:
            found.append(Piece(name, 0, 0, at, rows))
            at += rows
        return found


@dataclass(frozen=True)
class StackedExperts(Op):
    """The experts of one layer as one tensor [experts of the rank, rows, columns].

    `names`: HF names with {} for the expert's number; their tensors (each of `shape`) are stacked by rows: gate and up
    in w13_weight (`dim` 0: a rank holds its share of the rows of each), down in w2_weight (`dim` 1: of the columns).
    """

    names: tuple[str, ...]
    num_experts: int
    shape: tuple[int, int]
    dim: int
    axis: Axis = field(default="etp", kw_only=True)

    def __post_init__(self) -> None:
        assert self.dim == 0 or len(self.names) == 1, f"{self.param}: tensors cut by columns are not stacked by rows"

    @property
    def hf_shapes(self) -> dict[str, Shape]:
        return {name.format(i): self.shape for i in range(self.num_experts) for name in self.names}

    def shape_at(self, coordinate: ShardCoordinate) -> Shape:
        return (len(self._experts(coordinate)), *self._expert_shape(self.cut(coordinate)[1]))

    def pieces_at(self, coordinate: ShardCoordinate) -> list[Piece]:
        return list(self._pieces(self._experts(coordinate), *self.cut(coordinate)))

    def shard_shape(self, tp_size: int) -> Shape:
        """With all experts on every rank."""
        return (self.num_experts, *self._expert_shape(tp_size))

    def pieces(self, tp_rank: int, tp_size: int) -> list[Piece]:
        """With all experts on every rank."""
        return list(self._pieces(range(self.num_experts), tp_rank, tp_size))

    def _experts(self, coordinate: ShardCoordinate) -> range:
        if self.num_experts % coordinate.ep:
            raise ValueError(f"{self.param}: {self.num_experts} experts do not divide by ep_size={coordinate.ep}")
        n = self.num_experts // coordinate.ep
        return range(coordinate.ep_rank * n, (coordinate.ep_rank + 1) * n)

    def _expert_shape(self, size: int) -> Shape:
        rows, columns = (self._share(n, size) if d == self.dim else n for d, n in enumerate(self.shape))
        return (len(self.names) * rows, columns)

    def _pieces(self, experts: range, rank: int, size: int) -> Iterator[Piece]:
        n = self._share(self.shape[self.dim], size)
        for index, expert in enumerate(experts):
            for i, name in enumerate(self.names):
                yield Piece(name.format(expert), self.dim, rank * n, i * n, n, index)


@dataclass(frozen=True)
class StackedVocab(Op):
    """Rows of the vocabulary, padded to a multiple of VOCAB_PADDING; if ranks do not divide it, of VOCAB_PADDING * tp.

    Example: 151,936 rows on 4 ranks are 37,984 each; 100 rows on 3 ranks are padded to 192, 64 each.
    """

    hf_name: str
    vocab_size: int
    hidden: int

    @property
    def hf_shapes(self) -> dict[str, Shape]:
        return {self.hf_name: (self.vocab_size, self.hidden)}

    def shard_shape(self, tp_size: int) -> Shape:
        padded = _round_up(self.vocab_size, VOCAB_PADDING)
        if padded % tp_size:
            padded = _round_up(self.vocab_size, VOCAB_PADDING * tp_size)
        return (padded // tp_size, self.hidden)

    def pieces(self, tp_rank: int, tp_size: int) -> list[Piece]:
        rows = self.shard_shape(tp_size)[0]
        start, stop = tp_rank * rows, min((tp_rank + 1) * rows, self.vocab_size)
        return [Piece(self.hf_name, 0, start, 0, stop - start)] if stop > start else []


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
