"""One table of mappings per model family, made from the numbers of an HF `config.json`.

A family is added by one entry of FAMILIES; nothing else in this room knows model names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from megarl.weights.names import QKV, GateUp, Op, Rename, ValueHead, Vocab

VOCAB_MULTIPLE = 8  # as the models are built: mcore.model.padded_vocab_size

HFConfig = Mapping[str, Any]
Role = Literal["actor", "critic"]


def table_for(hf_config: HFConfig, *, role: Role = "actor", vocab_multiple: int = VOCAB_MULTIPLE) -> list[Op]:
    """Every parameter of the model, in the order of export: embedding, layers, final norm, head.

    `vocab_multiple`: rows of the vocabulary that each tensor-parallel rank's share is a multiple of.
    A critic has a value head in place of the output rows.
    """
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type={model_type!r} has no table of weight names; want one of {', '.join(FAMILIES)}")
    return FAMILIES[model_type](hf_config, role=role, vocab_multiple=vocab_multiple)


def is_tied(hf_config: HFConfig) -> bool:
    """Whether the output rows are the embedding's own."""
    return bool(hf_config.get("tie_word_embeddings", False))


def twins(hf_config: HFConfig) -> dict[str, str]:
    """HF names that a folder or a server may hold besides the table's, and the tensor that each is tied to."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if is_tied(hf_config) else {}


def ignorable(hf_config: HFConfig, role: Role) -> set[str]:
    """HF names that a folder may hold and this model does not: output rows of a critic, or the twins of tied ones."""
    return {"lm_head.weight"} if role == "critic" else set(twins(hf_config))


def _dense(c: HFConfig, *, role: Role, vocab_multiple: int, qkv_bias: bool, qk_norm: bool) -> list[Op]:
    """Decoders of Llama's shape: grouped-query attention, a gated feed-forward, RMS norms before both."""
    if c.get("attention_bias", qkv_bias) != qkv_bias:
        raise ValueError(
            f"attention_bias={c['attention_bias']} is not supported for model_type={c['model_type']!r}; want {qkv_bias}"
        )
    hidden = c["hidden_size"]
    layers = [op for i in range(c["num_hidden_layers"]) for op in _dense_layer(c, i, qkv_bias, qk_norm)]
    tied_copy = ("output_layer.weight",) if is_tied(c) and role == "actor" else ()  # of a last stage that is not first
    embedding = Vocab(
        "embedding.word_embeddings.weight",
        "model.embed_tokens.weight",
        c["vocab_size"],
        hidden,
        vocab_multiple,
        copies=tied_copy,
    )
    final_norm = Rename("decoder.final_layernorm.weight", "model.norm.weight", (hidden,))
    head: list[Op] = []
    if role == "critic":
        head = [ValueHead("output_layer.weight", "score.weight", (1, hidden))]
    elif not is_tied(c):
        head = [Vocab("output_layer.weight", "lm_head.weight", c["vocab_size"], hidden, vocab_multiple)]
    return [embedding, *layers, final_norm, *head]


def _dense_layer(c: HFConfig, layer: int, qkv_bias: bool, qk_norm: bool) -> list[Op]:
    hidden, ffn, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    groups = c.get("num_key_value_heads") or heads
    head_dim = c.get("head_dim") or hidden // heads
    hf, mg = f"model.layers.{layer}", f"decoder.layers.{layer}"
    attn, mg_attn = f"{hf}.self_attn", f"{mg}.self_attention"

    def qkv(kind: str, width: int | None) -> QKV:
        q, k, v = (f"{attn}.{x}_proj.{kind}" for x in "qkv")
        return QKV(f"{mg_attn}.linear_qkv.{kind}", q, k, v, heads, groups, head_dim, width)

    ops: list[Op] = [
        Rename(f"{mg}.input_layernorm.weight", f"{hf}.input_layernorm.weight", (hidden,)),
        qkv("weight", hidden),
    ]
    if qkv_bias:
        ops.append(qkv("bias", None))
    if qk_norm:
        ops.append(Rename(f"{mg_attn}.q_layernorm.weight", f"{attn}.q_norm.weight", (head_dim,)))
        ops.append(Rename(f"{mg_attn}.k_layernorm.weight", f"{attn}.k_norm.weight", (head_dim,)))
    return [
        *ops,
        Rename(f"{mg_attn}.linear_proj.weight", f"{attn}.o_proj.weight", (hidden, heads * head_dim), 1),
        Rename(f"{mg}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight", (hidden,)),
        GateUp(f"{mg}.mlp.linear_fc1.weight", f"{hf}.mlp.gate_proj.weight", f"{hf}.mlp.up_proj.weight", ffn, hidden),
        Rename(f"{mg}.mlp.linear_fc2.weight", f"{hf}.mlp.down_proj.weight", (hidden, ffn), 1),
    ]


FAMILIES: dict[str, Callable[..., list[Op]]] = {
    "qwen2": partial(_dense, qkv_bias=True, qk_norm=False),  # Qwen2, Qwen2.5
    "qwen3": partial(_dense, qkv_bias=False, qk_norm=True),
}
