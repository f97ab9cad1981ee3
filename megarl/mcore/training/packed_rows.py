"""Packs sequences into one row of this rank, and unpacks columns; the only place that aligns tokens and outputs.

Column t describes token t, which the model predicts at position t-1: labels shift left before the context-parallel
slice, and outputs shift right after the gather.  A sequence's first token has no prediction; its column is 0.

Padding exists only if something needs it: sequences to a multiple of 2 cp, the row to a multiple of tp cp, and one that
shares prefixes on a GPU to whole blocks.  Padding is not counted anywhere, and no column contains it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from torch import Tensor

from megarl.arch.layout import Layout
from megarl.data.prefix_tree import CommonPrefixes, PrefixTree
from megarl.mcore.logprobs.support import Support
from megarl.mcore.models.attention import PackedParams, PadPlan, pad_plan, zigzag
from megarl.mcore.models.prefix_trees.flex_tree import FlexPlan
from megarl.mcore.models.prefix_trees.tree_attention import TreePlan
from megarl.mcore.models.rope import with_positions
from megarl.samples.batch import SEGMENT_IDS, Batch, MicroBatch

Columns = Sequence[str]  # names of a batch's columns
_ALIGNED = 16  # bytes
_SEQUENCES, _LONGEST = 8, 512  # multiples to which the number of sequences, and the longest, are rounded for attention
PLANS: dict[str, type[TreePlan] | type[FlexPlan]] = {"cpu": TreePlan, "cuda": FlexPlan}  # of rows that share prefixes


@dataclass(frozen=True)
class PackedRow:
    """The inputs of one forward pass on this rank, the places of its outputs in the batch, and columns for its loss."""

    tokens: Tensor  # [1, T/cp] int64
    positions: Tensor  # [1, T/cp] int64, within each sequence
    labels: Tensor  # [T/cp] int64, the token that follows each
    targets: Tensor  # [T/cp] int64 in host memory: the index in the batch of what each place predicts; -1: of none
    inside: Tensor  # [T/cp] int64 in host memory: the place of each token in its sequence
    starts: Tensor  # [T/cp] the same: where its sequence begins in the whole row
    support: Support | None  # of `labels`, in host memory, if the batch knows it
    packed: PackedParams
    predicts: Tensor  # [N'] index, in the gathered row, of the output that predicts a token; N' = predicted tokens
    predicted: Tensor  # [N'] indices of these tokens in the batch
    num_tokens: int  # of the batch
    num_own_tokens: int  # in this context-parallel rank's slice, padding and dummies not counted
    columns: dict[str, Tensor]  # of the batch, those that were asked for: [N], on the device

    def slice(self, column: Tensor) -> Tensor:
        """The batch's column [N, ...] -> at each place of this rank the entry of the token that it predicts, on every
        stage: [T/cp, ...], 0 where there is none.  Both in host memory."""
        return _at(column, self.targets)

    def support_there(self) -> Support | None:
        """`support` on the row's device; the copy is not waited for."""
        if (own := self.support) is None:
            return None
        return Support(*on_device([own.starts, own.counts, own.ids], self.tokens.device))

    def later(self, column: Tensor, places: int) -> Tensor:
        """The batch's column [N] with each number so many tokens later in its sequence; 0 where none comes to stand."""
        for _ in range(places):
            column = torch.zeros_like(column).index_copy(0, self.predicted, column[self.predicted - 1])
        return column

    def column(self, output: Tensor) -> Tensor:
        """This rank's outputs [T/cp, ...] -> the batch's column [N, ...], whole on every context-parallel rank."""
        whole = gather_context(output)
        column = whole.new_zeros(self.num_tokens, *whole.shape[1:])
        return column.index_copy(0, self.predicted, whole.index_select(0, self.predicts))


class Rows(Sequence[PackedRow]):
    """The rows of micro-batches.  Each is made when its turn comes, while the device computes the one before."""

    def __init__(
        self, micros: Sequence[MicroBatch], layout: Layout, device: torch.device, columns: Columns = (), mtp: int = 0
    ) -> None:
        self._make = [partial(make_row, micro, layout, device, columns, mtp) for micro in micros]
        self._made: dict[int, PackedRow] = {}

    def __len__(self) -> int:
        return len(self._make)

    def __getitem__(self, index: Any) -> Any:
        if index not in self._made:
            self._made[index] = self._make[index]()
        return self._made[index]


def make_row(micro: MicroBatch, layout: Layout, device: torch.device, columns: Columns = (), mtp: int = 0) -> PackedRow:
    """Pack a micro-batch and take this rank's context-parallel slice.  `columns`: for its loss; `mtp`: MTP layers."""
    if micro.shares_prefixes:
        return _make_tree_row(micro, layout, device, columns)
    batch, lengths = micro.batch, micro.batch.lengths
    padded = padded_lengths(lengths.tolist(), layout)
    sizes = torch.tensor(padded)
    ends = sizes.cumsum(0)
    starts = ends - sizes
    row_ids = batch.row_ids
    inside = torch.arange(batch.num_tokens) - batch.row_starts[row_ids]
    at = starts[row_ids] + inside  # [N] position of each token in the packed row

    total = int(ends[-1])
    own = own_positions(starts.tolist(), padded, layout.cp)
    sources = torch.full((total,), -1).index_copy(0, at, torch.arange(batch.num_tokens))[own]
    predicted = torch.nonzero(inside > 0).squeeze(1)
    following = torch.full((batch.num_tokens + 1,), -1).index_copy(0, predicted - 1, predicted)  # the last: of padding
    positions = torch.arange(total) - torch.repeat_interleave(starts, sizes)
    targets = [following[sources]]
    for _ in range(mtp):
        targets.append(following[targets[-1]])
    places = _Places(
        sources=sources,
        targets=torch.stack(targets),
        positions=positions[own],
        starts=own - positions[own],
        ends=ends,
        longest=max(padded),
        pad=pad_plan(padded) if layout.cp == 1 else None,
        tree=None,
        predicts=where_gathered(own, at[predicted] - 1, layout.cp, starts.tolist(), padded),
        predicted=predicted,
        num_own_tokens=int((sources >= 0).sum()),
    )
    return _row(micro, device, columns, places)


def _make_tree_row(micro: MicroBatch, layout: Layout, device: torch.device, columns: Columns) -> PackedRow:
    """A row in which the tokens with which rows begin alike stand once."""
    assert layout.cp == 1, "common prefixes are not cut over context-parallel ranks"
    batch = micro.batch
    tree = PrefixTree.of(batch, CommonPrefixes.of(batch))
    plan = PLANS[device.type].of(tree, device)
    padding = -tree.num_places % math.lcm(plan.UNIT, layout.tp if layout.sequence_parallel else 1)
    predicted = torch.nonzero(tree.predicts >= 0).squeeze(1)
    places = _Places(
        sources=F.pad(tree.sources, (0, padding), value=-1),
        targets=F.pad(tree.targets, (0, padding), value=-1)[None],
        positions=F.pad(torch.from_numpy(tree.place_positions), (0, padding)),
        starts=torch.zeros(tree.num_places + padding, dtype=torch.int64),
        ends=torch.tensor([tree.num_places + padding]),
        longest=plan.longest,
        pad=None,
        tree=plan,
        predicts=tree.predicts[predicted],
        predicted=predicted,
        num_own_tokens=batch.num_tokens,  # a common token stands for those of all its rows
    )
    return _row(micro, device, columns, places)


@dataclass(frozen=True)
class _Places:
    """Where tokens stand in a row, and what they predict; for `predicts` and what follows it see PackedRow."""

    sources: Tensor  # [T/cp] of this rank's places: the index in the batch of each one's token; -1: padding
    targets: Tensor  # [1 + MTP layers, T/cp], those of the model first
    positions: Tensor  # [T/cp]
    starts: Tensor  # [T/cp]
    ends: Tensor  # [sequences] of the whole row
    longest: int  # sequence
    pad: PadPlan | None  # of attention, as PackedParams has them
    tree: TreePlan | FlexPlan | None
    predicts: Tensor
    predicted: Tensor
    num_own_tokens: int


def _row(micro: MicroBatch, device: torch.device, columns: Columns, places: _Places) -> PackedRow:
    batch = micro.batch
    ends = places.ends
    pad = places.pad
    of_row = {
        "tokens": _at(batch.tokens, places.sources)[None],
        "positions": places.positions[None],
        "labels": _at(batch.tokens, places.targets),
        "predicts": places.predicts,
        "predicted": places.predicted,
    }
    # cuDNN compiles attention anew for each number of sequences, and Megatron makes a table of angles for each longest
    # one: empty sequences and a rounded length leave a few of both.
    rounded = F.pad(ends, (0, -len(ends) % _SEQUENCES), value=int(ends[-1]))
    cu_seqlens = F.pad(rounded, (1, 0)).to(torch.int32)
    longest = -(-places.longest // _LONGEST) * _LONGEST
    of_loss = {name: batch.segment_ids if name == SEGMENT_IDS else batch.columns[name] for name in columns}
    slots = cu_seqlens if pad is None else pad.slots
    *found, cu_seqlens, slots = on_device([*of_row.values(), *of_loss.values(), cu_seqlens, slots], device)
    there = dict(zip(of_row, found, strict=False))
    cu_seqlens = with_positions(cu_seqlens, there["positions"][0])
    packed = PackedParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pad=None if pad is None else replace(pad, slots=slots),
        tree=places.tree,
        labels=there["labels"],
    )
    return PackedRow(
        **there | {"labels": there["labels"][0]},
        targets=places.targets[0],
        inside=places.positions,
        starts=places.starts,
        support=Support.of(batch, places.targets[0]),
        packed=packed,
        num_tokens=batch.num_tokens,
        num_own_tokens=0 if micro.is_dummy else places.num_own_tokens,
        columns=dict(zip(of_loss, found[len(of_row) :], strict=True)),
    )


def on_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of host tensors.  A GPU gets them in one copy out of pinned memory, which is not waited for."""
    return in_one_block(tensors, device) if device.type == "cuda" else [tensor.to(device) for tensor in tensors]


def in_one_block(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of host tensors in one piece of memory of the device."""
    places = [0]
    for tensor in tensors:
        places.append(places[-1] + -(-tensor.nbytes // _ALIGNED) * _ALIGNED)
    block = torch.empty(places[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")

    def part(of: Tensor, like: Tensor, place: int) -> Tensor:
        return of[place : place + like.nbytes].view(like.dtype).view(like.shape)

    for tensor, place in zip(tensors, places, strict=False):
        part(block, tensor, place).copy_(tensor)
    there = block.to(device, non_blocking=True)
    return [part(there, tensor, place) for tensor, place in zip(tensors, places, strict=False)]


def _at(column: Tensor, sources: Tensor) -> Tensor:
    """The entries of a column [N, ...] at these indices, -1 for the 0 behind its end; torch fills no uint16."""
    return torch.cat([column, column.new_zeros(1, *column.shape[1:])])[sources]


def padded_lengths(lengths: list[int], layout: Layout) -> list[int]:
    """Pad each sequence to a multiple of 2 cp, and the last one until the row is a multiple of tp cp (under sequence
    parallelism, where the row is split over tp).

    Example, cp=2, tp=1: [3, 5] -> [4, 8].
    """
    if layout.cp == 1 and not layout.sequence_parallel:
        return lengths
    unit = 2 * layout.cp if layout.cp > 1 else 1
    padded = [-(-length // unit) * unit for length in lengths]
    row_unit = math.lcm(unit, layout.tp * layout.cp if layout.sequence_parallel else 1)
    padded[-1] += -sum(padded) % row_unit
    return padded


def own_positions(starts: list[int], lengths: list[int], cp: int, rank: int | None = None) -> Tensor:
    """Positions of the padded row on a context-parallel rank (default: this rank), in the order of its slice."""
    if cp == 1:
        return torch.arange(sum(lengths))
    rank = ps.get_context_parallel_rank() if rank is None else rank
    return torch.cat([zigzag(a, size, cp, rank) for a, size in zip(starts, lengths, strict=True)])


def where_gathered(own: Tensor, predicts: Tensor, cp: int, starts: list[int], lengths: list[int]) -> Tensor:
    """Positions of the padded row -> indices into the concatenated slices of the context-parallel ranks."""
    if cp == 1:
        return predicts
    order = torch.cat([own_positions(starts, lengths, cp, rank) for rank in range(cp)])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return inverse[predicts]


class _GatherContext(torch.autograd.Function):
    """All-gather over context parallelism.  Every rank computes the whole loss, so backward takes only its slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        group = ps.get_context_parallel_group()
        ctx.rank, ctx.size = group.rank(), len(x)
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad[ctx.rank * ctx.size : (ctx.rank + 1) * ctx.size]


def gather_context(x: Tensor) -> Tensor:
    """[T/cp] -> [T], the concatenated slices of the context-parallel ranks."""
    return x if ps.get_context_parallel_world_size() == 1 else _GatherContext.apply(x)


def micro_batches(batch: Batch, micro_sizes: Sequence[int], *, shares_prefixes: bool = False) -> list[MicroBatch]:
    """The first micro_sizes[0] samples with all their rows, then the next, ...; a size of 0 is a dummy."""
    assert sum(micro_sizes) == batch.num_sequences, f"{sum(micro_sizes)} of {batch.num_sequences} samples are packed"
    out, first = [], 0
    for size in micro_sizes:
        own = MicroBatch(batch.select(range(first, first + size)), shares_prefixes=shares_prefixes) if size else None
        out.append(own or dummy(batch))
        first += size
    return out


def dummy(like: Batch) -> MicroBatch:
    """A micro-batch of two tokens; all its columns, including weights, are 0."""
    columns = {name: column.new_zeros(2, *column.shape[1:]) for name, column in like.columns.items()}
    return MicroBatch(Batch(torch.zeros(2, dtype=torch.int64), torch.tensor([2]), columns), is_dummy=True)


def in_whole_turns(micros: list[MicroBatch], layout: Layout) -> list[MicroBatch]:
    """Interleaved stages run micro-batches in groups of one for each pipeline rank: dummies fill the last group.

    Megatron also supports larger groups, which need no dummies, but keep activations of correspondingly more rows.
    """
    lacking = -len(micros) % layout.pp if layout.vpp > 1 else 0
    return [*micros, *(dummy(micros[0].batch) for _ in range(lacking))]
