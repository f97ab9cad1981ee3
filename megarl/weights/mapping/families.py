"""One table of mappings per model family, made from the numbers of an HF `config.json`.

A family is added by one entry of FAMILIES; nothing else in this folder knows names of model families.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

from megarl.weights.mapping.names import QKV, GateUp, Op, Rename, ValueHead, Vocab

VOCAB_MULTIPLE = 8  # the same as mcore.models.model.padded_vocab_size uses

HFConfig = Mapping[str, Any]
Role = Literal["actor", "critic"]


@dataclass(frozen=True)
class RouterBias(Rename):
    """Is float32 in every folder, trainer and server, whatever type the weights have."""

    keeps_dtype = True


def table_for(hf_config: HFConfig, *, role: Role = "actor", vocab_multiple: int = VOCAB_MULTIPLE) -> list[Op]:
    """Every parameter of the model, in the order of export: embedding, layers, final norm, head.

    `vocab_multiple`: the vocabulary rows of each tensor-parallel rank are padded to a multiple of this.
    A critic has a value head instead of the output rows.
    """
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type={model_type!r} has no table of weight names; expected one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type](hf_config, role=role, vocab_multiple=vocab_multiple)


def is_tied(hf_config: HFConfig) -> bool:
    """Whether the output rows are the embedding's own."""
    return bool(hf_config.get("tie_word_embeddings", False))


def tied(hf_config: HFConfig) -> dict[str, str]:
    """HF names that a folder or a server may hold in addition to the table's -> the tensor that each is tied to."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if is_tied(hf_config) else {}


@dataclass(frozen=True)
class Ignorable(Container[str]):
    names: frozenset[str]
    prefixes: tuple[str, ...]

    def __contains__(self, name: object) -> bool:
        return name in self.names or (isinstance(name, str) and name.startswith(self.prefixes))


def ignorable(hf_config: HFConfig, role: Role) -> Container[str]:
    """HF names that a folder may hold although this model does not have them.

    These are a critic's output rows, output rows that are tied, and multi-token-prediction layers after the last layer.
    """
    names = {"lm_head.weight"} if role == "critic" else set(tied(hf_config))
    return Ignorable(frozenset(names), _layers_of_further_tokens(hf_config))


def _decoder(c: HFConfig, role: Role, vocab_multiple: int, layers: Iterable[Op]) -> list[Op]:
    """Embedding, layers, final norm, and the head of the role."""
    hidden = c["hidden_size"]
    tied_copy = ("output_layer.weight",) if is_tied(c) and role == "actor" else ()  # if the last stage is not the first
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


def _dense(c: HFConfig, *, role: Role, vocab_multiple: int, qkv_bias: bool = False, qk_norm: bool = False) -> list[Op]:
    """Decoders like Llama's: grouped-query attention, a gated feed-forward, RMS norms before both."""
    layers = (
        [*_attention(c, i, qkv_bias, qk_norm), *_feed_forward(c, i, f"model.layers.{i}.mlp", c["intermediate_size"])]
        for i in range(c["num_hidden_layers"])
    )
    return _decoder(c, role, vocab_multiple, chain.from_iterable(layers))


def _qwen3_moe(c: HFConfig, *, role: Role, vocab_multiple: int) -> list[Op]:
    """Qwen3 with experts as feed-forwards, except in the layers that config.json leaves dense."""
    step, plain = c.get("decoder_sparse_step") or 1, c.get("mlp_only_layers") or ()
    ops: list[Op] = []
    for i in range(c["num_hidden_layers"]):
        mlp = f"model.layers.{i}.mlp"
        ops += _attention(c, i, qkv_bias=False, qk_norm=True)
        if (i + 1) % step or i in plain:
            ops += _feed_forward(c, i, mlp, c["intermediate_size"])
        else:
            ops += _experts(c, i, mlp, c["moe_intermediate_size"])
    return _decoder(c, role, vocab_multiple, ops)


def _mixtral(c: HFConfig, *, role: Role, vocab_multiple: int) -> list[Op]:
    ops: list[Op] = []
    for i in range(c["num_hidden_layers"]):
        ops += _attention(c, i, qkv_bias=False, qk_norm=False)
        ops += _experts(c, i, f"model.layers.{i}.block_sparse_moe", c["intermediate_size"], ("w1", "w3", "w2"))
    return _decoder(c, role, vocab_multiple, ops)


def _deepseek_v3(c: HFConfig, *, role: Role, vocab_multiple: int) -> list[Op]:
    return _decoder(c, role, vocab_multiple, _deepseek_layers(c))


def _attention(c: HFConfig, layer: int, qkv_bias: bool, qk_norm: bool) -> list[Op]:
    """One layer's attention, with the norm before it."""
    if c.get("attention_bias", qkv_bias) not in (qkv_bias, None):
        raise ValueError(
            f"attention_bias={c['attention_bias']} is not supported for model_type={c['model_type']!r}; expected "
            f"{qkv_bias}"
        )
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
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
    return [*ops, Rename(f"{mg_attn}.linear_proj.weight", f"{attn}.o_proj.weight", (hidden, heads * head_dim), 1)]


def _norm_of_mlp(c: HFConfig, layer: int) -> Op:
    name = f"model.layers.{layer}.post_attention_layernorm.weight"
    return Rename(f"decoder.layers.{layer}.pre_mlp_layernorm.weight", name, (c["hidden_size"],))


def _feed_forward(c: HFConfig, layer: int, mlp: str, ffn: int) -> list[Op]:
    """A dense feed-forward with the norm before it.  `mlp`: the module's HF name."""
    return [_norm_of_mlp(c, layer), *_gated(f"decoder.layers.{layer}.mlp", mlp, ffn, c["hidden_size"])]


def num_experts(c: HFConfig) -> int:
    """The number of routed experts; configs of the hub and of transformers 5 use different keys."""
    return c["num_experts"] if c.get("num_experts") is not None else c["num_local_experts"]


def _experts(
    c: HFConfig,
    layer: int,
    mlp: str,
    ffn: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Op]:
    """The norm, the router, and each expert separately.  `names`: the HF names of an expert's gate, up and down."""
    hidden, mg, count = c["hidden_size"], f"decoder.layers.{layer}.mlp", num_experts(c)
    ops: list[Op] = [
        _norm_of_mlp(c, layer),
        Rename(f"{mg}.router.weight", f"{mlp}.gate.weight", (count, hidden)),
    ]
    for i in range(count):
        gate, up, down = (f"{mlp}.experts.{i}.{name}.weight" for name in names)
        own, whose = f"{mg}.experts.local_experts.{i}", (i, count)
        ops.append(GateUp(f"{own}.linear_fc1.weight", gate, up, ffn, hidden, axis="etp", expert=whose))
        ops.append(Rename(f"{own}.linear_fc2.weight", down, (hidden, ffn), 1, axis="etp", expert=whose))
    return ops


def _deepseek_layers(c: HFConfig) -> list[Op]:
    """All layers, and at the end the routers' biases, which have another type than the weights and so stay together.

    The two latent projections (q_a, kv_a) are neighbours, because servers fuse them.
    """
    ops: list[Op] = []
    biases: list[Op] = []
    for i in range(c["num_hidden_layers"]):
        ops += _latent_attention(c, i)
        if i < (c.get("first_k_dense_replace") or 0):
            ops += _gated(f"decoder.layers.{i}.mlp", f"model.layers.{i}.mlp", c["intermediate_size"], c["hidden_size"])
        else:
            ops += _deepseek_experts(c, i)
            biases.append(_router_bias(c, i))
    return [*ops, *biases]


def _layers_of_further_tokens(c: HFConfig) -> tuple[str, ...]:
    """Prefixes of HF names of multi-token-prediction layers, which are neither trained nor served here."""
    first = c["num_hidden_layers"]
    return tuple(f"model.layers.{i}." for i in range(first, first + (c.get("num_nextn_predict_layers") or 0)))


def _latent_attention(c: HFConfig, layer: int) -> list[Op]:
    """Multi-head latent attention, with the norms before and after it."""
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    hf, mg = f"model.layers.{layer}", f"decoder.layers.{layer}"

    def own(param: str, name: str, shape: tuple[int, ...], dim: int | None = None) -> Op:
        return Rename(f"{mg}.self_attention.{param}.weight", f"{hf}.self_attn.{name}.weight", shape, dim)

    q_rank, q_rows = c.get("q_lora_rank"), heads * (nope + rope)
    latents = own("linear_kv_down_proj", "kv_a_proj_with_mqa", (rank + rope, hidden), 0)
    if q_rank is None:
        queries = [own("linear_q_proj", "q_proj", (q_rows, hidden), 0), latents]
    else:
        queries = [
            own("linear_q_down_proj", "q_a_proj", (q_rank, hidden), 0),
            latents,
            own("q_layernorm", "q_a_layernorm", (q_rank,)),
            own("linear_q_up_proj", "q_b_proj", (q_rows, q_rank), 0),
        ]
    return [
        Rename(f"{mg}.input_layernorm.weight", f"{hf}.input_layernorm.weight", (hidden,)),
        *queries,
        own("kv_layernorm", "kv_a_layernorm", (rank,)),
        own("linear_kv_up_proj", "kv_b_proj", (heads * (nope + value), rank), 0),
        own("linear_proj", "o_proj", (hidden, heads * value), 1),
        Rename(f"{mg}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight", (hidden,)),
    ]


def _deepseek_experts(c: HFConfig, layer: int) -> list[Op]:
    hidden, ffn, count = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    hf, mg = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
    ops: list[Op] = [Rename(f"{mg}.router.weight", f"{hf}.gate.weight", (count, hidden))]
    for n in range(count):
        ops += _gated(f"{mg}.experts.local_experts.{n}", f"{hf}.experts.{n}", ffn, hidden, (n, count))
    return [*ops, *_gated(f"{mg}.shared_experts", f"{hf}.shared_experts", ffn * c["n_shared_experts"], hidden)]


def _router_bias(c: HFConfig, layer: int) -> Op:
    name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
    return RouterBias(f"decoder.layers.{layer}.mlp.router.expert_bias", name, (c["n_routed_experts"],))


def _gated(mg: str, hf: str, ffn: int, hidden: int, expert: tuple[int, int] | None = None) -> list[Op]:
    """A gated feed-forward: of a dense layer, of all shared experts as one, or of one routed expert."""
    axis: Any = "tp" if expert is None else "etp"
    gate, up, down = (f"{hf}.{name}_proj.weight" for name in ("gate", "up", "down"))
    return [
        GateUp(f"{mg}.linear_fc1.weight", gate, up, ffn, hidden, axis=axis, expert=expert),
        Rename(f"{mg}.linear_fc2.weight", down, (hidden, ffn), 1, axis=axis, expert=expert),
    ]


FAMILIES: dict[str, Callable[..., list[Op]]] = {
    "qwen2": partial(_dense, qkv_bias=True),  # Qwen2, Qwen2.5
    "qwen3": partial(_dense, qk_norm=True),
    "qwen3_moe": _qwen3_moe,
    "llama": _dense,  # Llama 2 and 3
    "mistral": _dense,
    "mixtral": _mixtral,
    "deepseek_v3": _deepseek_v3,
}
