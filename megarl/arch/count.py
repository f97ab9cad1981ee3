"""Parameters of each kind of rank, and FLOPs per token, computed from the numbers of a config.json.

A rank's parameters depend only on its pipeline stage: the ranks of a stage hold equal parts.  Experts are counted
separately, because they are sharded over other ranks than the rest.  FLOPs are the basis of all predicted times:

    linear      2 operations per parameter that the token uses: of experts only the chosen ones
    attention   4 operations per key and head dimension (scores, and the sum of values), causal: half of the sequence
    head        2 operations per number of the vocabulary's table
    backward    twice the forward pass
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.arch.layout import Layout, dense_layers, padded_vocab_size
from megarl.arch.model_types import OF_0_19, checked

HFConfig = Mapping[str, Any]
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SPARSE = ("num_experts_per_tok", "moe_intermediate_size")
_LATENT = (*_SPARSE, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# The families of megarl/mcore, and what their configs need more; those with experts have something here.
NEEDED_MORE: dict[str, tuple[str, ...]] = {
    "qwen2": (),
    "qwen3": (),
    "qwen3_moe": _SPARSE,
    "llama": (),
    "mistral": (),
    "mixtral": ("num_experts_per_tok",),
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    "glm4_moe": _SPARSE,
    "minimax_m2": ("num_experts_per_tok",),
    "gpt_oss": ("num_experts_per_tok",),
}
FAMILIES = tuple(NEEDED_MORE)


class Parameters(NamedTuple):
    """Example: Parameters(dense=1_543_714_304, experts=0)."""

    dense: int  # attention, norms, feed-forwards, routers, shared experts, embedding and head
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def check(hf: HFConfig) -> None:
    """Raises: ValueError of one sentence for a config.json of another family or without a needed number."""
    kind = checked(hf.get("model_type"), (*FAMILIES, *OF_0_19))
    if kind in OF_0_19:
        raise ValueError(f"config.json: the planner does not know model_type {kind!r} yet; expected one of {FAMILIES}")
    missing = [name for name in (*NEEDED, *NEEDED_MORE[kind]) if hf.get(name) is None]
    if NEEDED_MORE[kind] and num_experts(hf) is None:
        missing.append("num_experts")
    if missing:
        raise ValueError(f"config.json: there is no {', '.join(missing)}; expected the config of a {kind} model")


def whole(hf: HFConfig, role: str = "actor") -> int:
    """Parameters of the model as its authors count them: not sharded, not padded, no duplicates."""
    padding = padded_vocab_size(hf["vocab_size"], 1) - hf["vocab_size"]
    tables = 1 if hf.get("tie_word_embeddings") or role == "critic" else 2
    return of_stage(hf, Layout(), 0, role).total - padding * hf["hidden_size"] * tables


def of_stage(hf: HFConfig, layout: Layout, stage: int, role: str = "actor") -> Parameters:
    """Parameters of each rank of pipeline stage `stage`.  role: only a critic has a value head."""
    dense, experts = _ends(hf, layout, stage, role), 0
    for sparse, count in kinds_of_stage(hf, layout, stage).items():
        layer = of_layer(hf, layout, sparse=sparse)
        dense, experts = dense + count * layer.dense, experts + count * layer.experts
    return Parameters(dense, experts)


def layers_of_stage(hf: HFConfig, layout: Layout, stage: int) -> list[int]:
    """Indices of the stage's layers.  Interleaved: the first chunks of all stages come before the second chunks."""
    parts = [layers // layout.vpp for layers in layout.stage_layers(hf["num_hidden_layers"])]
    turn, before = sum(parts), sum(parts[:stage])
    firsts = range(before, before + layout.vpp * turn, turn)
    return [layer for first in firsts for layer in range(first, first + parts[stage])]


def kinds_of_stage(hf: HFConfig, layout: Layout, stage: int) -> dict[bool, int]:
    """The number of the stage's layers with and without experts, without zeros: {True: 15, False: 1}."""
    sparse = sparse_layers(hf)
    kinds = [sparse[layer] for layer in layers_of_stage(hf, layout, stage)]
    return {kind: kinds.count(kind) for kind in (False, True) if kind in kinds}


def sparse_layers(hf: HFConfig) -> tuple[bool, ...]:
    """For every layer, whether it has experts."""
    layers = range(hf["num_hidden_layers"])
    if num_experts(hf) is None:
        return (False,) * len(layers)
    dense = dense_layers(hf)
    return tuple(layer not in dense for layer in layers)


def num_experts(hf: HFConfig) -> int | None:
    """Experts in a layer from which a router chooses."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if hf.get(name) is not None:
            return hf[name]
    return None


def expert_size(hf: HFConfig) -> int:
    """Intermediate size of an expert."""
    return hf.get("moe_intermediate_size") or hf["intermediate_size"]


def attention_size(hf: HFConfig) -> int:
    """Head dimension of standard attention."""
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def has_head_norms(hf: HFConfig) -> bool:
    """Whether queries and keys are normalised."""
    return hf["model_type"] in ("qwen3", "qwen3_moe", "minimax_m2") or bool(hf.get("use_qk_norm"))


def has_biases(hf: HFConfig) -> bool:
    """Whether every linear of a layer has a bias."""
    return bool(hf["model_type"] == "gpt_oss")


def largest_tensor(hf: HFConfig) -> int:
    """Numbers of the largest tensor of a folder: the embedding, a feed-forward, or a stack of experts."""
    of_experts = 2 * hf["intermediate_size"] * (num_experts(hf) or 0) if hf["model_type"] == "gpt_oss" else 0
    return int(hf["hidden_size"] * max(hf["vocab_size"], hf["intermediate_size"], of_experts))


def of_layer(hf: HFConfig, layout: Layout, *, sparse: bool) -> Parameters:
    """Parameters of a layer on each rank.  sparse: with experts."""
    hidden = hf["hidden_size"]
    attention = _latent_attention(hf, layout.tp) if "kv_lora_rank" in hf else _attention(hf, layout.tp)
    norms = 2 * hidden
    if not sparse:
        return Parameters(attention + norms + _gated(hidden, hf["intermediate_size"], layout.tp), 0)
    experts, size = num_experts(hf), expert_size(hf)
    assert experts is not None, "a sparse layer has experts"
    shared = _gated(hidden, size * (hf.get("n_shared_experts") or 0), layout.tp)
    expert, router = _gated(hidden, size, layout.expert_tp), hidden * experts  # the router is replicated on every rank
    if has_biases(hf):
        expert, router = expert + 2 * size + hidden, router + experts
    return Parameters(attention + norms + router + shared, experts // layout.ep * expert)


def _gated(hidden: int, width: int, tp: int) -> int:
    """Parameters of gate, up and down."""
    return 3 * hidden * width // tp


def _attention(hf: HFConfig, tp: int) -> int:
    hidden, heads, size = hf["hidden_size"], hf["num_attention_heads"], attention_size(hf)
    pairs = hf.get("num_key_value_heads") or heads
    qkv = (heads + 2 * pairs) * size
    bias = qkv if hf["model_type"] == "qwen2" or hf.get("attention_bias") or has_biases(hf) else 0
    norms = 2 * size if has_head_norms(hf) else 0
    if hf["model_type"] == "minimax_m2":  # of all heads at once
        norms = (heads + pairs) * size // tp
    whole = hidden if has_biases(hf) else 0  # the bias of the last linear, replicated on every rank
    sinks = heads if has_biases(hf) else 0
    return (hidden * qkv + bias + heads * size * hidden + sinks) // tp + norms + whole


def _latent_attention(hf: HFConfig, tp: int) -> int:
    """Multi-head latent attention: a latent for queries and a latent for keys and values, each with a norm."""
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
    plain, rope, value = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
    latent, q_latent = hf["kv_lora_rank"], hf.get("q_lora_rank")
    queries = heads * (plain + rope)
    q = (q_latent or hidden) * queries + hidden * (q_latent or 0)
    kv = hidden * (latent + rope) + latent * heads * (plain + value)
    return (q + kv + heads * value * hidden) // tp + (q_latent or 0) + latent


def _ends(hf: HFConfig, layout: Layout, stage: int, role: str) -> int:
    """Parameters of the embedding on the first stage, and of norm and head on the last."""
    hidden = hf["hidden_size"]
    table = padded_vocab_size(hf["vocab_size"], layout.tp) // layout.tp * hidden
    embedding = table if stage == 0 else 0
    if stage < layout.pp - 1:
        return embedding
    if role == "critic":
        return embedding + hidden + hidden
    is_same_table = bool(hf.get("tie_word_embeddings")) and layout.pp == 1  # else the last stage has its own copy
    return embedding + hidden + (0 if is_same_table else table)


@dataclass(frozen=True)
class Shape:
    """Per token, of the unsharded model."""

    hidden: int
    num_layers: int
    num_sparse: int  # layers with experts
    attention_params: int  # matrices of attention, and norms
    up_params: int  # those that make queries, keys and values of the latents of latent attention
    dense_params: int  # feed-forward of a layer without experts
    shared_params: int  # of a layer with experts: the router and the shared experts
    chosen_params: int  # the chosen experts
    expert_params: int  # all experts of a layer
    num_experts: int
    num_chosen: int
    key_flops: int  # attention's forward operations per key
    key_size: int  # numbers of a key and a value that a context-parallel ring sends
    cache_size: int  # numbers of a token in a layer's KV cache
    cache_parts: int  # ranks that can share these numbers; 1: every rank has all (the latent is common to all heads)
    head_params: int
    table_params: int  # the embedding and, if it is another table, the head

    def layer_params(self, sparse: bool) -> int:
        """Parameters of a layer that a token uses, without chosen experts."""
        return self.attention_params + (self.shared_params if sparse else self.dense_params)

    @property
    def active_params(self) -> int:
        """Parameters that a token uses, including the head, without the embedding."""
        sparse = self.num_sparse
        dense = self.num_layers - sparse
        layers = dense * self.layer_params(False) + sparse * (self.layer_params(True) + self.chosen_params)
        return layers + self.head_params


def shape_of(hf: HFConfig, role: str = "actor") -> Shape:
    """role: a critic has no vocabulary head."""
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
    pairs = hf.get("num_key_value_heads") or heads
    experts, chosen = num_experts(hf) or 0, (hf.get("num_experts_per_tok") or 0)
    dense = 3 * hidden * hf["intermediate_size"]
    if "kv_lora_rank" in hf:
        key, value = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"], hf["v_head_dim"]
        key_flops, key_size = 2 * heads * (key + value), heads * (key + value)
        up = heads * ((hf.get("q_lora_rank") or hidden) * key + hf["kv_lora_rank"] * (hf["qk_nope_head_dim"] + value))
        cache, parts = hf["kv_lora_rank"] + hf["qk_rope_head_dim"], 1
    else:
        size, up = attention_size(hf), 0
        key_flops, key_size, cache, parts = 4 * heads * size, 2 * pairs * size, 2 * pairs * size, pairs
    each = 3 * hidden * expert_size(hf) if experts else 0
    return Shape(
        hidden=hidden,
        num_layers=hf["num_hidden_layers"],
        num_sparse=sum(sparse_layers(hf)),
        attention_params=of_layer(hf, Layout(), sparse=False).dense - dense,
        up_params=up,
        dense_params=dense,
        shared_params=hidden * experts + each * (hf.get("n_shared_experts") or 0),
        chosen_params=chosen * each,
        expert_params=experts * each,
        num_experts=experts,
        num_chosen=chosen,
        key_flops=key_flops,
        key_size=key_size,
        cache_size=cache,
        cache_parts=parts,
        head_params=0 if role == "critic" else padded_vocab_size(hf["vocab_size"], 1) * hidden,
        table_params=hf["vocab_size"] * hidden * (1 if role == "critic" or hf.get("tie_word_embeddings") else 2),
    )


def forward_flops(shape: Shape, tokens: float, context: float) -> float:
    """FLOPs of a forward pass over `tokens` in sequences whose lengths have sum(l^2)/sum(l) = context."""
    return tokens * (2 * shape.active_params + shape.num_layers * shape.key_flops * context / 2)
