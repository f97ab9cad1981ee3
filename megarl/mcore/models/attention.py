"""Core attention in plain torch, used when Transformer Engine is missing.

Megatron's own local spec refuses packed sequences and context parallelism (dot_product_attention:57,153); this module
supports both, and windows in some layers and attention sinks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megarl.mcore.models.prefix_trees.flex_tree import FlexPlan
from megarl.mcore.models.prefix_trees.tree_attention import TreePlan


def zigzag(start: int, length: int, cp: int, rank: int) -> Tensor:
    """Positions of [start, start+length) on context-parallel rank `rank`: chunks rank and 2cp-1-rank of 2cp."""
    chunks = torch.arange(start, start + length).chunk(2 * cp)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])


class _ToPadded(torch.autograd.Function):
    """[T, ...] -> [slots, ...] with zeros between; `slots_of` [T] are distinct, so the gradient is a plain gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots_of: Tensor, num_slots: int) -> Tensor:
        ctx.save_for_backward(slots_of)
        return x.new_zeros(num_slots, *x.shape[1:]).index_copy_(0, slots_of, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _FromPadded(torch.autograd.Function):
    """The inverse: [slots, ...] -> [T, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots_of: Tensor) -> Tensor:
        ctx.save_for_backward(slots_of)
        ctx.shape = x.shape
        return x.index_select(0, slots_of)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.saved_tensors[0], grad), None


@dataclass(frozen=True)
class PadPlan:
    """Where to put the tokens of a packed row so that one dense causal call handles many sequences.

    Sequences of similar length share a bucket [s, l]; the buckets follow each other in a flat list of slots.
    Padding is at the end of each sequence, where causal attention ignores it.
    Example, lengths [2, 40, 3]: buckets [(2, 3), (1, 40)], slots 0 1 | 6..45 | 3 4 5.
    """

    slots: Tensor  # [T] int64, distinct
    buckets: tuple[tuple[int, int], ...]  # (sequences, longest length) of each
    in_place: bool = False  # each token's slot equals its position in the row

    @property
    def num_slots(self) -> int:
        return sum(s * length for s, length in self.buckets)


def pad_plan(lengths: list[int], waste: float = 1.3) -> PadPlan:
    """Buckets in which the longest sequence is at most `waste` times the shortest, plus 8 tokens."""
    buckets: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if buckets and lengths[i] <= waste * lengths[buckets[-1][0]] + 8:
            buckets[-1].append(i)
        else:
            buckets.append([i])
    first_slot, offset = [0] * len(lengths), 0
    for bucket in buckets:
        longest = lengths[bucket[-1]]
        for n, i in enumerate(bucket):
            first_slot[i] = offset + n * longest
        offset += len(bucket) * longest
    size = torch.tensor(lengths)
    start = size.cumsum(0) - size
    shift = torch.repeat_interleave(torch.tensor(first_slot) - start, size)
    slots = torch.arange(int(size.sum())) + shift
    return PadPlan(slots, tuple((len(b), lengths[b[-1]]) for b in buckets), in_place=not bool(shift.any()))


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's description of a packed row, with the plan of its attention, computed once for all layers."""

    pad: PadPlan | None = None
    tree: TreePlan | FlexPlan | None = None  # of a row in which common prefixes stand once
    # By the number of a layer, from 1: the keys that are given in place of its indexer's choice, as places in the whole
    # row, -1 for none: [this rank's tokens, keys of a token] int32 in host memory.
    keys: dict[int, Tensor] = field(default_factory=dict)
    labels: Any = None  # Tensor [1 + MTP layers, T/cp] int64, the tokens that follow each place, the next one first


class SDPAttention(MegatronModule):
    """Causal attention by torch's scaled_dot_product_attention.

    sbhd: q [s, b, n, d] -> [s, b, n*e];  thd (packed row): q [t, n, d] with cu_seqlens -> [t, n*e], for values of
    size e.  Sizes are taken from the tensors; the sizes that Megatron passes are ignored.
    Context parallelism gathers keys and values and masks by true position: correct, but meant for CPU and small cp.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp, self.scale = groups.cp, softmax_scale
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if has_window else None  # tokens seen, including itself
        assert config.softmax_type in ("vanilla", "learnable"), "no model of ours has a constant beside the scores"
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        # Its name and place are those of Transformer-Engine's attention.
        self.softmax_offset = (
            nn.Parameter(torch.zeros(heads, dtype=config.params_dtype)) if config.softmax_type == "learnable" else None
        )
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal), "decoders only"
        assert not (config.attention_dropout if attention_dropout is None else attention_dropout), "dropout is 0 in RL"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        assert attention_bias is None, "attention bias is not supported"
        if packed_seq_params is None:
            assert self.cp.size() == 1, "context parallelism needs packed rows"
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._causal(q, k, v).permute(2, 0, 1, 3).flatten(2)
        if self.cp.size() > 1:
            return self._context_parallel(query, key, value, _lengths(packed_seq_params)).flatten(1)
        if (tree := getattr(packed_seq_params, "tree", None)) is not None:
            scale = query.size(-1) ** -0.5 if self.scale is None else self.scale
            return tree.attend(query, key, value, self.softmax_offset, self.window, scale).flatten(1)
        pad = getattr(packed_seq_params, "pad", None)
        if pad is None:
            plan = pad_plan(_lengths(packed_seq_params))
            pad = replace(plan, slots=plan.slots.to(query.device))
        return self._packed(query, key, value, pad).flatten(1)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention with the window; only sequences longer than the window need a mask, of length^2 bytes."""
        length = q.size(2)
        if self.window is None or length <= self.window:
            return self._sdpa(q, k, v)
        at = torch.arange(length, device=q.device)
        return self._sdpa(q, k, v, self._sees(at, at))

    def _sees(self, at_q: Tensor, at_k: Tensor) -> Tensor:
        """[q, k] bool: whether the token at position q attends to the token at position k of its sequence."""
        back = at_q[:, None] - at_k
        return back >= 0 if self.window is None else (back >= 0) & (back < self.window)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """[b, n, s, d] each, and [b, n, s, e] values -> [b, n, s, e]; with sinks if the model has them."""
        if self.softmax_offset is None:
            return self._scored(q, k, v, mask, self.scale)
        scale = q.size(-1) ** -0.5 if self.scale is None else self.scale
        return self._scored(*with_sinks(q, k, v, mask, self.softmax_offset / scale), scale)[:, :, 1:, : v.size(-1)]

    def _scored(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """The softmax of the scores times the values.

        [b, n, s, d] each; keys and values may have fewer heads (grouped-query attention).

        On CUDA a mask makes every key and value head repeat, since flash attention takes no mask, and the
        memory-efficient kernel no fewer heads (torch's sdp_utils.cpp); without both, all heads' scores are in memory.
        """
        if mask is not None and q.is_cuda:
            k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.size(1) != k.size(1)
        )

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """For checkpoints: sinks are cut with the heads; there is nothing else."""
        return cut_over_ranks(self, "softmax_offset", prefix, sharded_offsets)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, pad: PadPlan) -> Tensor:
        q, k, v = query, key, value
        if not pad.in_place:
            q, k, v = (_ToPadded.apply(x, pad.slots, pad.num_slots) for x in (q, k, v))
        sizes = [s * length for s, length in pad.buckets]
        parts = []
        for shape, *qkv in zip(pad.buckets, *(x.split(sizes) for x in (q, k, v)), strict=True):
            part = self._causal(*(x.unflatten(0, shape).transpose(1, 2) for x in qkv))
            parts.append(part.transpose(1, 2).flatten(0, 1))
        dense = torch.cat(parts) if len(parts) > 1 else parts[0]
        return dense if pad.in_place else _FromPadded.apply(dense, pad.slots)

    def _context_parallel(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        n, rank, device = self.cp.size(), self.cp.rank(), query.device
        assert all(length % (2 * n) == 0 for length in lengths), "sequences are padded to 2 cp"
        key, value = (gather_from_sequence_parallel_region(x.contiguous(), True, self.cp) for x in (key, value))
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        held = [torch.cat([zigzag(a, size, n, r) for a, size in zip(starts, lengths, strict=True)]) for r in range(n)]
        at_q, at_k = held[rank].to(device), torch.cat(held).to(device)
        segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
        mask = self._sees(at_q, at_k) & (segment[at_q][:, None] == segment[at_k])
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        return self._sdpa(q, k, v, mask)[0].transpose(0, 1)


def cut_over_ranks(module: nn.Module, name: str, prefix: str, offsets: Any) -> dict[str, Any]:
    """A module's part of a checkpoint, whose parameter `name` is cut over tensor-parallel ranks."""
    state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        module.state_dict(keep_vars=True),
        prefix,
        {name: 0},
        offsets,
        tp_group=ps.get_tensor_model_parallel_group(),
        dp_cp_group=ps.get_data_parallel_group(with_context_parallel=True),
    )
    return state


def with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Put a key before all others, with a value of zeros, whose score is the sink of the query's head, [n] in `sinks`.

    q and k [b, n, s, d] get a dimension more: it holds the sink in queries, 1 in the new key and 0 in the others.  All
    are padded to the next multiple of 8, values [b, n, s, e] too: the memory-efficient kernel, the only fast one that
    takes a mask, wants that in 16 bits.  A query before all others, whose output is of no use, leaves causal attention
    causal, and sees something under every mask [queries, keys].
    """
    batch, _, length, _ = q.shape
    q = F.pad(torch.cat((q, sinks.to(q.dtype).view(1, -1, 1, 1).expand(batch, -1, length, 1)), -1), (0, 0, 1, 0))
    is_sink = torch.zeros(k.size(2) + 1, k.size(3) + 1, dtype=k.dtype, device=k.device)
    is_sink[0, -1] = 1
    k = F.pad(k, (0, 1, 1, 0)) + is_sink
    width = -(-k.size(3) // 8) * 8
    q, k = (F.pad(x, (0, width - x.size(3))) for x in (q, k))
    v = F.pad(v, (0, width - v.size(3), 1, 0))
    return q, k, v, None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)


def _lengths(packed: PackedSeqParams) -> list[int]:
    """Lengths of the sequences of a packed row, with padding; synchronizes with the device."""
    ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    return [b - a for a, b in pairwise(ends.tolist())]
