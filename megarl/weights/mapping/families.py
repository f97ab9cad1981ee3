"""One table of mappings per model family, made from the numbers of an HF `config.json`.

A family is added by one entry of FAMILIES; nothing else in this folder knows names of model families.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from megarl.arch.layout import dense_layers, layers_that_share
from megarl.arch.model_types import known
from megarl.arch.mtp import trained_mtp
from megarl.weights.mapping.blocks import (
    HFConfig,
    QKNorm,
    Role,
    attention,
    biased_experts,
    decoder,
    experts,
    feed_forward,
    indexer,
    is_router_bias,
    is_tied,
    latent_attention,
    router_bias,
    shared_experts,
    stacks_of_biased_experts,
)
from megarl.weights.mapping.gated_delta import hybrid_layer
from megarl.weights.mapping.mamba import mixed_layer
from megarl.weights.mapping.mtp import MTP_PREFIX, mtp_layers, shared_copies
from megarl.weights.mapping.names import Op
from megarl.weights.mapping.stacks import PlainStack, Stack

# Keys of config.json with the number of layers that predict further tokens, which follow the others.
LAYERS_OF_FURTHER_TOKENS = ("num_nextn_predict_layers", "num_mtp_modules")
VOCAB_MULTIPLE = 8  # the same as mcore.models.model.padded_vocab_size uses

Layers = Callable[[HFConfig, int], list[Op]]  # (config.json, number of a layer) -> the layer's mappings


def table_for(hf_config: HFConfig, *, role: Role = "actor", vocab_multiple: int = VOCAB_MULTIPLE) -> list[Op]:
    """Every parameter of the model, in the order of export: embedding, layers, final norm, head.

    After the layers come their parameters that are always float32, which so stay together.
    `vocab_multiple`: the vocabulary rows of each tensor-parallel rank are padded to a multiple of this.
    A critic has a value head instead of the output rows.
    """
    family = family_of(hf_config)
    layers = chain.from_iterable(family.layer(hf_config, i) for i in range(hf_config["num_hidden_layers"]))
    ordered, further = sorted(layers, key=lambda op: op.keeps_dtype), mtp_layers(hf_config, family.layer)
    return decoder(hf_config, role, vocab_multiple, chain(ordered, further), names=family.around_layers)


def layer_of(hf_config: HFConfig, layer: int) -> list[Op]:
    """The parameters of a layer; a router's bias, which no optimizer changes, is none."""
    return [op for op in family_of(hf_config).layer(hf_config, layer) if not is_router_bias(op)]


def family_of(hf_config: HFConfig) -> Family:
    return FAMILIES[known(hf_config.get("model_type"), FAMILIES)]


def stacks_for(hf_config: HFConfig) -> list[Stack]:
    """The stacks in which folders and servers have this model's experts; [] for most families, and unknown ones."""
    family = FAMILIES.get(hf_config.get("model_type", ""))
    return list(family.stacks(hf_config)) if family else []


def plain_stacks(table: Iterable[Op]) -> list[PlainStack]:
    """The stacks in which transformers saves the experts of this table without their hub names."""
    found = []
    for op in table:
        first, shape = next(iter(op.hf_shapes.items()))
        if op.expert is None or op.expert[0] or len(shape) != 2:
            continue
        layer = re.match(r"(?:model|backbone|mtp)\.layers\.\d+", first)
        assert layer, f"{first} is of no layer"
        name = "gate_up_proj" if len(op.hf_shapes) == 2 else "up_proj" if ".up_proj." in first else "down_proj"
        module = "mixer" if ".mixer." in first else "mlp"
        parts = tuple(part.replace(".experts.0.", ".experts.{}.") for part in op.hf_shapes)
        found.append(PlainStack(f"{layer[0]}.{module}.experts.{name}", op.expert[1], parts, shape))
    return found


def name_beside_vision(hf_config: HFConfig, name: str) -> str:
    """The HF name of a tensor of the table in a folder with a vision part, where the family has such."""
    prefix = FAMILIES[hf_config["model_type"]].beside_vision
    return name if prefix is None else re.sub(r"^model\.", prefix, name)


def tied(hf_config: HFConfig) -> dict[str, str]:
    """HF names that a folder or a server may hold in addition to the table's -> the tensor that each is tied to."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if is_tied(hf_config) else {}


@dataclass(frozen=True)
class Ignorable(Container[str]):
    names: frozenset[str]
    prefixes: tuple[str, ...]

    def __contains__(self, name: object) -> bool:
        is_own = name in self.names or (isinstance(name, str) and name.startswith(self.prefixes))
        return is_own or str(name).endswith("rotary_emb.inv_freq")  # computed, and once stored with the weights


def ignorable(hf_config: HFConfig, role: Role) -> Container[str]:
    """HF names that a folder may hold although this model does not have them.

    These are a critic's output rows, output rows that are tied, what is `untrained`, copies of embedding and output
    rows in MTP layers that are trained, and frequencies of the rotary embedding.
    """
    names = {"lm_head.weight"} if role == "critic" else set(tied(hf_config))
    return Ignorable(frozenset(names | shared_copies(hf_config).keys()), untrained(hf_config))


def untrained(c: HFConfig) -> tuple[str, ...]:
    """Prefixes of HF names of what is neither trained nor served here: multi-token-prediction layers, vision parts."""
    others = FAMILIES[c["model_type"]].untrained
    if trained_mtp(c):
        return tuple(prefix for prefix in others if prefix != MTP_PREFIX)
    first, count = c["num_hidden_layers"], next((c[key] for key in LAYERS_OF_FURTHER_TOKENS if c.get(key)), 0)
    layers = tuple(f"model.layers.{i}." for i in range(first, first + count))
    return (*layers, *others)


def _dense(c: HFConfig, layer: int, *, qkv_bias: bool = False, qk_norm: QKNorm | None = None) -> list[Op]:
    """Decoders like Llama's: grouped-query attention, a gated feed-forward, RMS norms before both."""
    return [*attention(c, layer, qkv_bias=qkv_bias, qk_norm=qk_norm), *feed_forward(c, layer)]


def _qwen3_moe(c: HFConfig, layer: int) -> list[Op]:
    """Qwen3 with experts as feed-forwards, except in the layers that config.json leaves dense."""
    if layer in dense_layers(c):
        return _dense(c, layer, qk_norm="head")
    mlp = experts(c, layer, f"model.layers.{layer}.mlp", num_experts(c), c["moe_intermediate_size"])
    return [*attention(c, layer, qk_norm="head"), *mlp]


def _mixtral(c: HFConfig, layer: int) -> list[Op]:
    mlp = f"model.layers.{layer}.block_sparse_moe"
    return [*attention(c, layer), *experts(c, layer, mlp, num_experts(c), c["intermediate_size"], ("w1", "w3", "w2"))]


def num_experts(c: HFConfig) -> int:
    """The number of routed experts; configs of the hub and of transformers 5 use different keys."""
    return c["num_experts"] if c.get("num_experts") is not None else c["num_local_experts"]


def _deepseek_v3(c: HFConfig, layer: int) -> list[Op]:
    return [*latent_attention(c, layer), *_shared_and_routed(c, layer)]


def _sparse_latent(c: HFConfig, layer: int) -> list[Op]:
    """DeepSeek-V3's layers, with an indexer in those that do not take over the choice of another."""
    chooser = [] if layer in layers_that_share(c) else indexer(c, layer)
    return [*latent_attention(c, layer), *chooser, *_shared_and_routed(c, layer)]


def _shared_and_routed(c: HFConfig, layer: int) -> list[Op]:
    """The feed-forward of DeepSeek-V3's layers: the first are dense, the others have shared and routed experts."""
    if layer in dense_layers(c):
        return feed_forward(c, layer)
    mlp, count = f"model.layers.{layer}.mlp", c["n_routed_experts"]
    bias = router_bias(layer, f"{mlp}.gate.e_score_correction_bias", count)
    return [*experts(c, layer, mlp, count, c["moe_intermediate_size"]), *shared_experts(c, layer, mlp), bias]


def _glm4_moe(c: HFConfig, layer: int) -> list[Op]:
    norm: QKNorm | None = "head" if c.get("use_qk_norm") else None
    own = attention(c, layer, qkv_bias=bool(c.get("attention_bias")), qk_norm=norm)
    return [*own, *_shared_and_routed(c, layer)]


def _minimax_m2(c: HFConfig, layer: int) -> list[Op]:
    mlp, count = f"model.layers.{layer}.block_sparse_moe", num_experts(c)
    routed = experts(c, layer, mlp, count, c["intermediate_size"], ("w1", "w3", "w2"))
    bias = router_bias(layer, f"{mlp}.e_score_correction_bias", count)
    return [*attention(c, layer, qk_norm="all heads"), *routed, bias]


def _gpt_oss(c: HFConfig, layer: int) -> list[Op]:
    own = attention(c, layer, qkv_bias=True, output_bias=True, sinks=True)
    return [*own, *biased_experts(c, layer, f"model.layers.{layer}.mlp")]


def _stacks_of_gpt_oss(c: HFConfig) -> list[Stack]:
    layers = range(c["num_hidden_layers"])
    return [stack for i in layers for stack in stacks_of_biased_experts(c, f"model.layers.{i}.mlp")]


def _none(_: HFConfig) -> Iterator[Any]:
    return iter(())


@dataclass(frozen=True)
class Family:
    """How a table of models of one `model_type` is made.

    `float32_in_sglang`: endings of the HF names of weights that SGLang holds in float32 whatever the model's type.
    `as_config_in_sglang`: endings of those that it holds in the type that config.json says.
    `without_in_sglang`: a part of HF names that the names of SGLang's parameters lack, from dot to dot.
    `stacks`: tensors outside in place of those of single experts in the table.
    `untrained`: prefixes of names of parts that are not in the table.
    `zero_centred`: its norms multiply by 1 + weight, but for those of a delta net's heads.
    `beside_vision`: what stands before the layers' names, in place of `model.`, in a folder with a vision part.
    `around_layers`: the HF names of the embedding and of the final norm.
    """

    layer: Layers
    float32_in_sglang: tuple[str, ...] = ()
    as_config_in_sglang: tuple[str, ...] = ()
    without_in_sglang: str = ""
    stacks: Callable[[HFConfig], Iterable[Stack]] = _none
    untrained: tuple[str, ...] = ()
    beside_vision: str | None = None
    zero_centred: bool = False
    around_layers: tuple[str, str] = ("model.embed_tokens", "model.norm")


_HYBRID = Family(hybrid_layer, float32_in_sglang=(".A_log",), without_in_sglang=".self_attn.", zero_centred=True)
FAMILIES: dict[str, Family] = {
    "qwen2": Family(partial(_dense, qkv_bias=True)),  # Qwen2, Qwen2.5
    "qwen3": Family(partial(_dense, qk_norm="head")),
    "qwen3_moe": Family(_qwen3_moe),
    "llama": Family(_dense),  # Llama 2 and 3
    "mistral": Family(_dense),
    "mixtral": Family(_mixtral),
    "deepseek_v3": Family(_deepseek_v3),
    "kimi_k2": Family(_deepseek_v3),
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"),
        Family(_sparse_latent, (".indexer.k_norm.weight", ".indexer.k_norm.bias")),
    ),
    "glm4_moe": Family(_glm4_moe, (".mlp.gate.weight",)),
    "minimax_m2": Family(_minimax_m2, (".block_sparse_moe.gate.weight",)),
    "gpt_oss": Family(_gpt_oss, stacks=_stacks_of_gpt_oss),
    "nemotron_h": Family(
        mixed_layer, untrained=(MTP_PREFIX,), around_layers=("backbone.embeddings", "backbone.norm_f")
    ),
    "qwen3_next": replace(_HYBRID, untrained=(MTP_PREFIX,), as_config_in_sglang=(".linear_attn.norm.weight",)),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"),
        replace(_HYBRID, untrained=(MTP_PREFIX, "model.visual."), beside_vision="model.language_model."),
    ),
}
