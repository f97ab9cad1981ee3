"""DeepSeek-V3's table: latents and their norms, experts shared and routed, and the router's bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.weights.mapping.names import GateUp, Op, Rename

HFConfig = Mapping[str, Any]


@dataclass(frozen=True)
class RouterBias(Rename):
    """float32 in every folder, trainer and server, whatever type the weights have."""

    keeps_dtype = True


def layers(c: HFConfig) -> list[Op]:
    """All layers, and at the end the routers' biases: a run of one type, where the weights have another.

    Tensors of latents stand together, as servers fuse them.
    """
    ops: list[Op] = []
    biases: list[Op] = []
    for i in range(c["num_hidden_layers"]):
        ops += _attention(c, i)
        if i < (c.get("first_k_dense_replace") or 0):
            ops += _gated(f"decoder.layers.{i}.mlp", f"model.layers.{i}.mlp", c["intermediate_size"], c["hidden_size"])
        else:
            ops += _experts(c, i)
            biases.append(_bias(c, i))
    return [*ops, *biases]


def passed_over(c: HFConfig) -> tuple[str, ...]:
    """Prefixes of HF names of layers that predict further tokens, which are neither trained nor served here."""
    first = c["num_hidden_layers"]
    return tuple(f"model.layers.{i}." for i in range(first, first + (c.get("num_nextn_predict_layers") or 0)))


def _attention(c: HFConfig, layer: int) -> list[Op]:
    """The norms before and after it included."""
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


def _experts(c: HFConfig, layer: int) -> list[Op]:
    hidden, ffn, count = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    hf, mg = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
    ops: list[Op] = [Rename(f"{mg}.router.weight", f"{hf}.gate.weight", (count, hidden))]
    for n in range(count):
        ops += _gated(f"{mg}.experts.local_experts.{n}", f"{hf}.experts.{n}", ffn, hidden, (n, count))
    return [*ops, *_gated(f"{mg}.shared_experts", f"{hf}.shared_experts", ffn * c["n_shared_experts"], hidden)]


def _bias(c: HFConfig, layer: int) -> Op:
    name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
    return RouterBias(f"decoder.layers.{layer}.mlp.router.expert_bias", name, (c["n_routed_experts"],))


def _gated(mg: str, hf: str, ffn: int, hidden: int, expert: tuple[int, int] | None = None) -> list[Op]:
    """A gated feed-forward: a dense layer's, the shared experts' as one, or one routed expert's."""
    axis: Any = "tp" if expert is None else "etp"
    gate, up, down = (f"{hf}.{name}_proj.weight" for name in ("gate", "up", "down"))
    return [
        GateUp(f"{mg}.linear_fc1.weight", gate, up, ffn, hidden, axis=axis, expert=expert),
        Rename(f"{mg}.linear_fc2.weight", down, (hidden, ffn), 1, axis=axis, expert=expert),
    ]
