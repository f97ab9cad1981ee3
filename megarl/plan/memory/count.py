"""Parameters of each kind of rank, computed from the numbers of a config.json.

A rank's parameters depend only on its pipeline stage: the ranks of a stage hold equal parts.  Experts are counted
separately, because they are sharded over other ranks than the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from megarl.layout import Layout, padded_vocab_size
from megarl.model_types import refusal

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
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(refusal(kind, FAMILIES))
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


def has_experts(hf: HFConfig, layer: int) -> bool:
    """Whether this layer has experts."""
    return _is_sparse(layer, *_sparse_numbers(hf))


def sparse_layers(hf: HFConfig) -> tuple[bool, ...]:
    """For every layer, whether it has experts."""
    return _sparse_layers(hf["num_hidden_layers"], *_sparse_numbers(hf))


def _sparse_numbers(hf: HFConfig) -> tuple[int | None, int, int, tuple[int, ...]]:
    """Number of experts, number of first dense layers, step between layers with experts, and other dense layers."""
    first, step = hf.get("first_k_dense_replace") or 0, hf.get("decoder_sparse_step") or 1
    return num_experts(hf), first, step, tuple(hf.get("mlp_only_layers") or ())


def _is_sparse(layer: int, experts: int | None, first: int, step: int, plain: tuple[int, ...]) -> bool:
    return experts is not None and layer >= first and (layer + 1) % step == 0 and layer not in plain


@cache
def _sparse_layers(layers: int, experts: int | None, first: int, step: int, plain: tuple[int, ...]) -> tuple[bool, ...]:
    return tuple(_is_sparse(layer, experts, first, step, plain) for layer in range(layers))


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
