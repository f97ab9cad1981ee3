"""Layers of Nemotron-H and Nemotron-3: a Mamba-2 mixer, attention, a feed-forward or experts, each with its norm."""

from __future__ import annotations

from typing import Any

from megarl.arch.layers import EXPERTS, FULL, LINEAR, MLP
from megarl.weights.mapping.blocks import HFConfig, router_bias
from megarl.weights.mapping.names import QKV, ByHeads, HeadRows, Op, Rename, Shape


def mixed_layer(c: HFConfig, layer: int) -> list[Op]:
    """Layer `layer` as config.json's layers_block_type has it."""
    kind, hf = c["layers_block_type"][layer], f"backbone.layers.{layer}"
    own = f"decoder.layers.{layer}.{'mlp' if kind in (MLP, EXPERTS) else 'self_attention'}"
    norm = "pre_mlp_layernorm" if kind in (MLP, EXPERTS) else "input_layernorm"
    make = {LINEAR: _mixer, FULL: _attention, MLP: _feed_forward, EXPERTS: _experts}[kind]
    before = Rename(f"decoder.layers.{layer}.{norm}.weight", f"{hf}.norm.weight", (c["hidden_size"],))
    made = [before, *make(c, own, f"{hf}.mixer")]
    if kind == EXPERTS:
        made.append(router_bias(layer, f"{hf}.mixer.gate.e_score_correction_bias", c["n_routed_experts"]))
    return made


def _attention(c: HFConfig, mg: str, hf: str) -> list[Op]:
    hidden, heads, head_dim = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    q, k, v = (f"{hf}.{x}_proj.weight" for x in "qkv")
    return [
        QKV(f"{mg}.linear_qkv.weight", q, k, v, heads, c["num_key_value_heads"], head_dim, hidden),
        Rename(f"{mg}.linear_proj.weight", f"{hf}.o_proj.weight", (hidden, heads * head_dim), 1),
    ]


def _feed_forward(c: HFConfig, mg: str, hf: str) -> list[Op]:
    return _plain(mg, hf, c["intermediate_size"], c["hidden_size"])


def _plain(mg: str, hf: str, ffn: int, hidden: int, **how: Any) -> list[Op]:
    """A feed-forward without a gate."""
    return [
        Rename(f"{mg}.linear_fc1.weight", f"{hf}.up_proj.weight", (ffn, hidden), 0, **how),
        Rename(f"{mg}.linear_fc2.weight", f"{hf}.down_proj.weight", (hidden, ffn), 1, **how),
    ]


def _experts(c: HFConfig, mg: str, hf: str) -> list[Op]:
    """A router, routed experts, a shared one, and the projections to and from the latent that the routed ones see."""
    hidden, count, latent = c["hidden_size"], c["n_routed_experts"], c.get("moe_latent_size")
    width = latent or hidden
    ops: list[Op] = [Rename(f"{mg}.router.weight", f"{hf}.gate.weight", (count, hidden))]
    for n in range(count):
        names, sizes = (f"{mg}.experts.local_experts.{n}", f"{hf}.experts.{n}"), (c["moe_intermediate_size"], width)
        ops += _plain(*names, *sizes, axis="etp", expert=(n, count))
    ops += _plain(f"{mg}.shared_experts", f"{hf}.shared_experts", c["moe_shared_expert_intermediate_size"], hidden)
    for name, shape in (("fc1_latent_proj", (latent, hidden)), ("fc2_latent_proj", (hidden, latent))) if latent else ():
        ops.append(Rename(f"{mg}.{name}.weight", f"{hf}.{name}.weight", shape))
    return ops


def _mixer(c: HFConfig, mg: str, hf: str) -> list[Op]:
    """The input projection has the rows of z, x, B, C and dt, the convolution those of x, B and C."""
    hidden, heads, size = c["hidden_size"], c["mamba_num_heads"], c["mamba_head_dim"]
    groups, state, inner = c["n_groups"], c["ssm_state_size"], heads * size
    width = inner + 2 * groups * state  # of x, B and C

    def of_conv(name: str, first: int = 0) -> tuple[HeadRows, ...]:
        return (
            HeadRows(name, heads, size, size, first),
            HeadRows(name, groups, state, state, first + inner),
            HeadRows(name, groups, state, state, first + inner + groups * state),
        )

    def cut(param: str, name: str, parts: tuple[HeadRows, ...], rows: int, rest: Shape) -> Op:
        return ByHeads(f"{mg}.{param}", parts, ((name, (rows, *rest)),), rest)

    given, conv, bias = f"{hf}.in_proj.weight", f"{hf}.conv1d.weight", f"{hf}.conv1d.bias"
    rows = (HeadRows(given, heads, size, size, 0), *of_conv(given, inner), HeadRows(given, heads, 1, 1, inner + width))
    return [
        cut("in_proj.weight", given, rows, inner + width + heads, (hidden,)),
        cut("conv1d_weight", conv, of_conv(conv), width, (1, c["conv_kernel"])),
        cut("conv1d_bias", bias, of_conv(bias), width, ()),
        *(Rename(f"{mg}.{x}", f"{hf}.{x}", (heads,), 0, keeps_dtype=True) for x in ("dt_bias", "A_log", "D")),
        Rename(f"{mg}.norm.weight", f"{hf}.norm.weight", (inner,), 0),
        Rename(f"{mg}.out_proj.weight", f"{hf}.out_proj.weight", (hidden, inner), 1),
    ]
