"""The tables of servers: each server parameter and its HF tensors, as mappings of `names`.

The HF server holds HF tensors unchanged.  SGLang fuses some of them into one parameter and cuts most over its ranks.
How it does so follows from the HF names, in the same way for every family.  A server's gate_up_proj is a `GateUp`, its
row-parallel and replicated layers are `Rename`; the classes here are its other fused layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from megarl.weights.mapping.families import HFConfig, table_for
from megarl.weights.mapping.names import QKV, Axis, GateUp, Op, Piece, Rename, Shape, ShardCoordinate

EngineKind = Literal["hf", "sglang"]
Shapes = Mapping[str, Shape]

_CUT_BY_COLUMNS = re.compile(r"\.(o_proj|down_proj)\.weight$")
_CUT_BY_ROWS = re.compile(r"\.(q_b_proj|kv_b_proj)\.weight$")
# Cut over the ranks of an attention group.  In SGLang these are attention and the embedding (attn_tp_group), and with
# --enable-dp-lm-head the head; feed-forward layers and experts are always cut over all ranks of the server.
_OF_ATTENTION_GROUP = re.compile(r"\.self_attn\.|embed_tokens\.weight$|lm_head\.weight$")
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(\w+)\.weight$")
# first tensor of a stack of experts -> the parameter, the tensors stacked in it by rows, and the dimension of the cut
_STACKS: Mapping[str, tuple[str, tuple[str, ...], int]] = {
    "gate_proj": ("w13_weight", ("gate_proj", "up_proj"), 0),
    "w1": ("w13_weight", ("w1", "w3"), 0),
    "down_proj": ("w2_weight", ("down_proj",), 1),
    "w2": ("w2_weight", ("w2",), 1),
}

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
class StackedRows(Op):
    """Several tensors stacked by rows, e.g. q_a_proj above kv_a_proj_with_mqa.

    `parts`: (HF name, rows) from top to bottom.  If `is_cut`, a rank holds its share of the rows of each part, else
    every rank holds all rows.  `hidden` is None for a bias.
    """

    parts: tuple[tuple[str, int], ...]
    hidden: int | None
    is_cut: bool = True

    @property
    def is_sharded(self) -> bool:
        return self.is_cut

    @property
    def hf_shapes(self) -> dict[str, Shape]:
        return {name: self._shape(rows) for name, rows in self.parts}

    def shard_shape(self, tp_size: int) -> Shape:
        return self._shape(sum(self._rows(rows, tp_size) for _, rows in self.parts))

    def pieces(self, tp_rank: int, tp_size: int) -> list[Piece]:
        found, at = [], 0
        for name, whole in self.parts:
            rows = self._rows(whole, tp_size)
            found.append(Piece(name, 0, tp_rank * rows if self.is_cut else 0, at, rows))
            at += rows
        return found

    def _shape(self, rows: int) -> Shape:
        return (rows,) if self.hidden is None else (rows, self.hidden)

    def _rows(self, whole: int, tp_size: int) -> int:
        return self._share(whole, tp_size) if self.is_cut else whole


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


def server_table(engine: EngineKind, hf_config: HFConfig) -> list[Op]:
    """Every parameter of the server's model, under the server's names, in the order of the trainer's export."""
    shapes = {name: shape for op in table_for(hf_config) for name, shape in op.hf_shapes.items()}
    if engine == "hf":
        return [Rename(name, name, shape) for name, shape in shapes.items()]
    ops = [op for name in shapes if (op := _sglang(name, shapes, hf_config)) is not None]
    return [replace(op, axis="attn") if _OF_ATTENTION_GROUP.search(op.param) else op for op in ops]


def coordinates(tp: int, ep: int = 1, attention_dp: int = 1) -> list[ShardCoordinate]:
    """The coordinate of each rank of an SGLang server.

    `ep` groups of neighbouring ranks share the experts.  `attention_dp` groups of neighbouring ranks have attention and
    the vocabulary each, for requests of their own.
    """
    etp, attn = tp // ep, tp // attention_dp
    return [ShardCoordinate(rank, tp, rank // etp, ep, rank % etp, etp, rank % attn, attn) for rank in range(tp)]


def is_enlarged(engine: EngineKind, hf_config: HFConfig, tp: int) -> bool:
    """Whether an SGLang server without GPU pads the model so that it divides over the ranks.

    It rounds feed-forward sizes up to a multiple of 32 per rank, and numbers of heads up to a multiple of the ranks.
    """
    if engine == "hf":
        return False
    sizes = [hf_config.get(key) or 0 for key in ("intermediate_size", "moe_intermediate_size")]
    heads = [hf_config["num_attention_heads"], hf_config.get("num_key_value_heads") or tp]
    return any(size % (32 * tp) for size in sizes) or any(count % tp for count in heads)


def _sglang(name: str, shapes: Shapes, config: HFConfig) -> Op | None:
    """The parameter that begins with the tensor `name`; None if the tensor is a later part of a fused parameter."""
    shape = shapes[name]
    if re.search(r"(embed_tokens|lm_head)\.weight$", name):
        return StackedVocab(name, name, *shape)
    if found := _EXPERT.match(name):
        return _experts(found[1], found[3], shapes) if found[2] == "0" else None
    for part, make in _FUSED.items():
        if f".{part}." in name:
            return make(name, shapes, config)
    if any(f".{part}." in name for part in ("k_proj", "v_proj", "up_proj")):
        return None
    if ".kv_a_proj_with_mqa." in name and name.replace(".kv_a_proj_with_mqa.", ".q_a_proj.") in shapes:
        return None
    if _CUT_BY_COLUMNS.search(name):
        return Rename(name, name, shape, 1)
    return Rename(name, name, shape, 0 if _CUT_BY_ROWS.search(name) else None)


def _qkv(q: str, shapes: Shapes, config: HFConfig) -> Op:
    k, v = (q.replace(".q_proj.", f".{x}_proj.") for x in "kv")
    if k not in shapes:  # latent attention: q_proj is not fused
        return Rename(q, q, shapes[q], 0)
    heads = config["num_attention_heads"]
    head_dim = shapes[q][0] // heads
    width = shapes[q][1] if len(shapes[q]) == 2 else None
    return StackedQKV(q.replace(".q_proj.", ".qkv_proj."), q, k, v, heads, shapes[k][0] // head_dim, head_dim, width)


def _gate_up(gate: str, shapes: Shapes, _: HFConfig) -> Op:
    param, up = (gate.replace(".gate_proj.", f".{x}.") for x in ("gate_up_proj", "up_proj"))
    return GateUp(param, gate, up, *shapes[gate])


def _latents(q_a: str, shapes: Shapes, _: HFConfig) -> Op:
    """Latent attention's two down projections, whole on every rank."""
    kv_a = q_a.replace(".q_a_proj.", ".kv_a_proj_with_mqa.")
    rows = ((q_a, shapes[q_a][0]), (kv_a, shapes[kv_a][0]))
    return StackedRows(q_a.replace(".q_a_proj.", ".fused_qkv_a_proj_with_mqa."), rows, shapes[q_a][1], is_cut=False)


def _experts(prefix: str, kind: str, shapes: Shapes) -> Op | None:
    """The stack over all experts that begins with expert 0's tensor `kind`."""
    if kind not in _STACKS:
        return None
    param, parts, cut = _STACKS[kind]
    count = sum(name.startswith(f"{prefix}.") and name.endswith(f".{kind}.weight") for name in shapes)
    rows, columns = shapes[f"{prefix}.0.{kind}.weight"]
    names = tuple(f"{prefix}.{{}}.{part}.weight" for part in parts)
    return StackedExperts(f"{prefix}.{param}", names, count, (rows, columns), cut)


_FUSED: Mapping[str, Callable[[str, Shapes, HFConfig], Op]] = {
    "q_proj": _qkv,
    "gate_proj": _gate_up,
    "q_a_proj": _latents,
}
