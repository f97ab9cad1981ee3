"""Attention over long packed rows beside its definition at some positions, forwards and backwards.

tests/gpu runs rows of 32k tokens by our module and Transformer-Engine's; a test on the CPU runs short ones.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.mcore.models.attention import PackedParams

NUM_LOOKED_AT = 64


@dataclass(frozen=True)
class Heads:
    """The sizes of an attention."""

    queries: int
    pairs: int  # of keys and values
    key_size: int
    value_size: int
    window: int | None = None  # tokens that a token sees, itself among them
    has_sinks: bool = False


KINDS = {
    "grouped queries": Heads(16, 4, 128, 128),
    "sliding window": Heads(16, 4, 128, 128, window=4096),
    "latent": Heads(16, 16, 192, 128),  # as DeepSeek-V3's core attention has them
}


def errors(core: Any, heads: Heads, lengths: list[int], dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """|got - exact| / |exact| of the outputs at some positions, and of the gradients of a sum over these.

    `core`: the class of a core attention, as Megatron's layers make it.
    """
    total = sum(lengths)
    g = torch.Generator().manual_seed(0)
    shapes = {"query": (heads.queries, heads.key_size), "key": (heads.pairs, heads.key_size)}
    shapes["value"] = (heads.pairs, heads.value_size)
    inputs = {
        name: torch.randn(total, *s, generator=g).to(device, dtype).requires_grad_() for name, s in shapes.items()
    }
    at = torch.randperm(total, generator=g)[:NUM_LOOKED_AT].sort().values.tolist()
    weight = torch.randn(len(at), heads.queries * heads.value_size, generator=g).to(device, torch.float64)
    got = attend(core, heads, lengths, inputs)[at].double()
    exact_inputs = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    exact = definition(heads, lengths, at, **exact_inputs)
    found = {"output": _relative(got, exact)}
    own = torch.autograd.grad((got * weight).sum(), list(inputs.values()))
    theirs = torch.autograd.grad((exact * weight).sum(), list(exact_inputs.values()))
    pairs = zip(inputs, own, theirs, strict=True)
    return found | {name: _relative(gradient.double(), expected) for name, gradient, expected in pairs}


def attend(core: Any, heads: Heads, lengths: list[int], inputs: dict[str, Tensor]) -> Tensor:
    """[t, queries * value_size] of a packed row, by the module as a layer calls it."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads.queries * heads.key_size,
        num_attention_heads=heads.queries,
        num_query_groups=heads.pairs,
        kv_channels=heads.key_size,
        attention_dropout=0.0,
        window_size=None if heads.window is None else (heads.window - 1, 0),
        bf16=inputs["query"].dtype == torch.bfloat16,
    )
    module = core(
        config,
        1,
        AttnMaskType.causal,
        "self",
        softmax_scale=heads.key_size**-0.5,
        k_channels=heads.key_size,
        v_channels=heads.value_size,
    )
    ends = torch.tensor([0, *lengths]).cumsum(0).to(inputs["query"].device, torch.int32)
    packed = PackedParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)
    )
    out: Tensor = module(**inputs, attention_mask=None, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed)
    return out.flatten(1)


def definition(heads: Heads, lengths: list[int], at: list[int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The outputs [len(at), queries * value_size] at these positions of the row."""
    starts = [start for i, length in enumerate(lengths) for start in [sum(lengths[:i])] * length]
    shared = heads.queries // heads.pairs
    rows = []
    for t in at:
        first = max(starts[t], 0 if heads.window is None else t + 1 - heads.window)
        keys, values = (x[first : t + 1].repeat_interleave(shared, 1) for x in (key, value))
        scores = torch.einsum("nd,snd->ns", query[t], keys) * heads.key_size**-0.5
        rows.append(torch.einsum("ns,sne->ne", scores.softmax(-1), values).flatten())
    return torch.stack(rows)


def _relative(got: Tensor, exact: Tensor) -> float:
    return ((got - exact).norm() / exact.norm()).item()
