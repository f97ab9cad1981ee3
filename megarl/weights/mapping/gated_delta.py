"""Layers of Qwen3-Next and Qwen3.5: a gated delta net or gated attention, then a feed-forward or experts."""

from __future__ import annotations

from megarl.arch.layout import dense_layers
from megarl.weights.mapping.blocks import HFConfig, attention, experts, feed_forward, gated
from megarl.weights.mapping.names import ByHeads, HeadRows, Op, Rename, Shape


def hybrid_layer(c: HFConfig, layer: int) -> list[Op]:
    """Layer `layer` as config.json's layer_types and experts have it."""
    is_linear = c["layer_types"][layer] == "linear_attention"
    own = delta_net(c, layer) if is_linear else attention(c, layer, qk_norm="head", gated=True)
    is_dense = not c.get("num_experts") or layer in dense_layers(c)
    return [*own, *(feed_forward(c, layer) if is_dense else _experts(c, layer))]


def _experts(c: HFConfig, layer: int) -> list[Op]:
    """Routed experts, and a shared one with a gate."""
    hidden, hf, mg = c["hidden_size"], f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp.shared_experts"
    return [
        *experts(c, layer, hf, c["num_experts"], c["moe_intermediate_size"]),
        *gated(mg, f"{hf}.shared_expert", c["shared_expert_intermediate_size"], hidden),
        Rename(f"{mg}.gate_weight", f"{hf}.shared_expert_gate.weight", (1, hidden)),
    ]


def delta_net(c: HFConfig, layer: int) -> list[Op]:
    """A gated delta net with the norm before it.

    Qwen3-Next has one tensor for q, k, v and z, and one for beta and alpha: for each head of keys its q, its k, and v
    and z of the heads of values that it serves.  Qwen3.5 has q, k and v one below the other, and z, beta and alpha
    each in a tensor.
    """
    hidden, hf, mg = c["hidden_size"], f"model.layers.{layer}.linear_attn", f"decoder.layers.{layer}.self_attention"
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    key, value = c["linear_key_head_dim"], c["linear_value_head_dim"]
    each = values // keys  # heads of values for a head of keys
    if c["model_type"] == "qwen3_next":
        both, gates = f"{hf}.in_proj_qkvz.weight", f"{hf}.in_proj_ba.weight"
        step = 2 * key + 2 * each * value
        parts = [
            HeadRows(both, keys, key, step, 0),
            HeadRows(both, keys, key, step, key),
            HeadRows(both, keys, each * value, step, 2 * key),
            HeadRows(both, keys, each * value, step, 2 * key + each * value),
            HeadRows(gates, keys, each, 2 * each, 0),
            HeadRows(gates, keys, each, 2 * each, each),
        ]
        shapes = [(both, (keys * step, hidden)), (gates, (2 * values, hidden))]
    else:
        qkv, z, beta, alpha = (f"{hf}.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
        parts = [
            *qkv_heads(qkv, c),
            HeadRows(z, values, value, value, 0),
            HeadRows(beta, values, 1, 1, 0),
            HeadRows(alpha, values, 1, 1, 0),
        ]
        shapes = [(qkv, (2 * keys * key + values * value, hidden)), (z, (values * value, hidden))]
        shapes += [(beta, (values, hidden)), (alpha, (values, hidden))]
    conv, taps = f"{hf}.conv1d.weight", (1, c["linear_conv_kernel_dim"])
    whole: Shape = (2 * keys * key + values * value, *taps)
    norm = f"model.layers.{layer}.input_layernorm.weight"
    return [
        Rename(f"decoder.layers.{layer}.input_layernorm.weight", norm, (hidden,)),
        ByHeads(f"{mg}.in_proj.weight", tuple(parts), tuple(shapes), (hidden,)),
        ByHeads(f"{mg}.conv1d.weight", tuple(qkv_heads(conv, c)), ((conv, whole),), taps),
        Rename(f"{mg}.dt_bias", f"{hf}.dt_bias", (values,), 0),
        Rename(f"{mg}.A_log", f"{hf}.A_log", (values,), 0, keeps_dtype=True),
        Rename(f"{mg}.out_norm.weight", f"{hf}.norm.weight", (value,)),
        Rename(f"{mg}.out_proj.weight", f"{hf}.out_proj.weight", (hidden, values * value), 1),
    ]


def qkv_heads(name: str, c: HFConfig) -> list[HeadRows]:
    """The heads of q, of k and of v, one below the other in the tensor `name`."""
    keys, key, value = c["linear_num_key_heads"], c["linear_key_head_dim"], c["linear_value_head_dim"]
    return [
        HeadRows(name, keys, key, key, 0),
        HeadRows(name, keys, key, key, keys * key),
        HeadRows(name, c["linear_num_value_heads"], value, value, 2 * keys * key),
    ]
