"""The tables of servers: each server parameter and its HF tensors, as mappings of `names`.

The HF server holds HF tensors unchanged.  SGLang fuses some of them into one parameter and cuts most over its ranks.
How it does so follows from the HF names, in the same way for every family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from megarl.arch.sglang_config import UNKNOWN
from megarl.weights.mapping.blocks import HFConfig
from megarl.weights.mapping.families import FAMILIES, stacks_for, table_for
from megarl.weights.mapping.gated_delta import qkv_heads
from megarl.weights.mapping.mtp import in_draft
from megarl.weights.mapping.names import ByHeads, GateUp, HeadRows, Op, Rename, Shape, ShardCoordinate
from megarl.weights.mapping.sglang_ops import KeyHeads, StackedExperts, StackedQKV, StackedRows, StackedVocab
from megarl.weights.mapping.stacks import joined_sizes

EngineKind = Literal["hf", "sglang"]
Shapes = Mapping[str, Shape]

_CUT_BY_COLUMNS = re.compile(r"\.(o_proj|out_proj|down_proj)\.weight$")
# The last four are of gated delta nets; the rows of Qwen3-Next's are by heads of keys.
_CUT_BY_ROWS = re.compile(r"\.((q_b_proj|kv_b_proj|in_proj_qkvz|in_proj_ba)\.weight|A_log|dt_bias)$")
# Cut over the ranks of an attention group.  In SGLang these are attention and the embedding (attn_tp_group), and with
# --enable-dp-lm-head the head; feed-forward layers and experts are always cut over all ranks of the server.
_OF_ATTENTION_GROUP = re.compile(r"\.(self|linear)_attn\.|embed_tokens\.weight$|lm_head\.weight$")
_NORM_OF_HEADS = re.compile(r"^(.*\.self_attn)\.[qk]_norm\.weight$")
_ZERO_CENTRED = re.compile(r"(layernorm|\.[qk]_norm|^(draft\.)?model\.norm|\.pre_fc_norm_\w+)\.weight$")
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(\w+)\.weight$")
# first tensor of a stack of experts -> the parameter, the tensors stacked in it by rows, and the dimension of the cut
_STACKS: Mapping[str, tuple[str, tuple[str, ...], int]] = {
    "gate_proj": ("w13_weight", ("gate_proj", "up_proj"), 0),
    "w1": ("w13_weight", ("w1", "w3"), 0),
    "down_proj": ("w2_weight", ("down_proj",), 1),
    "w2": ("w2_weight", ("w2",), 1),
}


def server_table(engine: EngineKind, hf_config: HFConfig) -> list[Op]:
    """Every parameter of the server's model, under the server's names, in the order of the trainer's export.

    With MTP layers that of its draft model too, but for the embedding and output rows that both share.

    Raises: ValueError for a family whose parameters in SGLang are not known here.
    """
    if engine == "sglang" and hf_config["model_type"] in UNKNOWN:
        raise ValueError(f"SGLang's parameters of {hf_config['model_type']} are not known here; expected the hf engine")
    shapes = {name: shape for op in table_for(hf_config) for name, shape in op.hf_shapes.items()}
    if stacks := stacks_for(hf_config):  # of these no server's parameters are known here but by their HF names
        sizes = joined_sizes({name: (shape, None) for name, shape in shapes.items()}, stacks)
        shapes = {name: shape for name, (shape, _) in sizes.items()}
    if engine == "hf" or stacks:
        return [Rename(name, name, shape) for name, shape in shapes.items()]
    ops = [op for name in shapes if (op := _sglang(name, shapes, hf_config)) is not None]
    family = FAMILIES[hf_config["model_type"]]
    ops = [replace(op, own_dtype="float32") if op.param.endswith(family.float32_in_sglang) else op for op in ops]
    said = hf_config.get("dtype")
    ops = [replace(op, own_dtype=said) if op.param.endswith(family.as_config_in_sglang) else op for op in ops]
    ops = [replace(op, axis="attn") if _OF_ATTENTION_GROUP.search(op.param) else op for op in ops]
    if without := family.without_in_sglang:
        ops = [replace(op, param=op.param.replace(without, ".")) for op in ops]
    return [replace(op, param=in_draft(hf_config, op.param) or op.param) for op in ops]


def derived_table(engine: EngineKind, hf_config: HFConfig) -> list[Op]:
    """What a server computes from its parameters and holds beside them: 1 + weight of norms around 0 (GemmaRMSNorm)."""
    if engine == "hf" or not FAMILIES[hf_config["model_type"]].zero_centred:
        return []
    norms = [op for op in server_table(engine, hf_config) if _ZERO_CENTRED.search(op.param)]
    return [replace(op, param=op.param.removesuffix("weight") + "gemma_weight", added=1.0) for op in norms]


def coordinates(tp: int, ep: int = 1, attention_dp: int = 1) -> list[ShardCoordinate]:
    """The coordinate of each rank of an SGLang server.

    `ep` groups of neighbouring ranks share the experts.  `attention_dp` groups of neighbouring ranks have attention and
    the vocabulary each, for requests of their own.
    """
    etp, attn = tp // ep, tp // attention_dp
    return [ShardCoordinate(rank, tp, rank // etp, ep, rank % etp, etp, rank % attn, attn) for rank in range(tp)]


def is_enlarged(engine: EngineKind, hf_config: HFConfig, tp: int) -> bool:
    """Whether an SGLang server without GPU pads the model so that it divides over the ranks.

    It rounds feed-forward sizes up to a multiple of 32 per rank, and numbers of heads up to a multiple of the ranks.
    """
    if engine == "hf":
        return False
    feed_forwards = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    sizes = [hf_config.get(key) or 0 for key in feed_forwards]
    linear = [hf_config.get(f"linear_num_{what}_heads") or tp for what in ("key", "value")]
    heads = [hf_config["num_attention_heads"], hf_config.get("num_key_value_heads") or tp, *linear]
    return any(size % (32 * tp) for size in sizes) or any(count % tp for count in heads)


def _sglang(name: str, shapes: Shapes, config: HFConfig) -> Op | None:
    """The parameter that begins with the tensor `name`; None if the tensor is a later part of a fused parameter."""
    shape = shapes[name]
    if re.search(r"(embed_tokens|lm_head)\.weight$", name):
        return StackedVocab(name, name, *shape)
    if found := _EXPERT.match(name):
        return _experts(found[1], found[3], shapes) if found[2] == "0" else None
    for part, make in _FUSED.items():
        if f".{part}." in name:
            return make(name, shapes, config)
    if any(f".{part}." in name for part in ("k_proj", "v_proj", "up_proj", "in_proj_z", "in_proj_a")):
        return None
    if ".kv_a_proj_with_mqa." in name and name.replace(".kv_a_proj_with_mqa.", ".q_a_proj.") in shapes:
        return None
    if found := _NORM_OF_HEADS.match(name):
        return _norm_of_heads(name, found[1], shapes, config)
    if _CUT_BY_COLUMNS.search(name):
        return Rename(name, name, shape, 1)
    return Rename(name, name, shape, 0 if _CUT_BY_ROWS.search(name) else None)


def _qkv(q: str, shapes: Shapes, config: HFConfig) -> Op:
    k, v = (q.replace(".q_proj.", f".{x}_proj.") for x in "kv")
    if k not in shapes:  # latent attention: q_proj is not fused
        return Rename(q, q, shapes[q], 0)
    head_dim = _head_dim(q.rpartition(".q_proj.")[0], shapes, config)
    heads, groups = (shapes[name][0] // head_dim for name in (q, k))  # a gate is a further head of q
    width = shapes[q][1] if len(shapes[q]) == 2 else None
    return StackedQKV(q.replace(".q_proj.", ".qkv_proj."), q, k, v, heads, groups, head_dim, width)


def _head_dim(attention: str, shapes: Shapes, config: HFConfig) -> int:
    return shapes[f"{attention}.o_proj.weight"][1] // int(config["num_attention_heads"])


def _norm_of_heads(name: str, attention: str, shapes: Shapes, config: HFConfig) -> Op:
    """A norm of q or k: whole on every rank if it is of one head, else cut as the heads are."""
    head_dim, size = _head_dim(attention, shapes, config), shapes[name][0]
    if size == head_dim:
        return Rename(name, name, (size,))
    is_of_keys = name.endswith("k_norm.weight")
    return KeyHeads(name, name, size // head_dim, head_dim) if is_of_keys else Rename(name, name, (size,), 0)


def _gate_up(gate: str, shapes: Shapes, _: HFConfig) -> Op:
    param, up = (gate.replace(".gate_proj.", f".{x}.") for x in ("gate_up_proj", "up_proj"))
    return GateUp(param, gate, up, *shapes[gate])


def _latents(q_a: str, shapes: Shapes, _: HFConfig) -> Op:
    """Latent attention's two down projections, whole on every rank."""
    kv_a = q_a.replace(".q_a_proj.", ".kv_a_proj_with_mqa.")
    rows = ((q_a, shapes[q_a][0]), (kv_a, shapes[kv_a][0]))
    return StackedRows(q_a.replace(".q_a_proj.", ".fused_qkv_a_proj_with_mqa."), rows, shapes[q_a][1])


def _delta_inputs(qkv: str, shapes: Shapes, config: HFConfig) -> Op:
    """q, k, v and z of a gated delta net that has them in two tensors."""
    z = qkv.replace(".in_proj_qkv.", ".in_proj_z.")
    values, rows = config["linear_num_value_heads"], config["linear_value_head_dim"]
    parts = (*qkv_heads(qkv, config), HeadRows(z, values, rows, rows, 0))
    both = tuple((name, shapes[name]) for name in (qkv, z))
    return ByHeads(qkv.replace(".in_proj_qkv.", ".in_proj_qkvz."), parts, both, shapes[qkv][1:])


def _delta_gates(beta: str, shapes: Shapes, config: HFConfig) -> Op:
    names = (beta, beta.replace(".in_proj_b.", ".in_proj_a."))
    parts = tuple(HeadRows(name, config["linear_num_value_heads"], 1, 1, 0) for name in names)
    both = tuple((name, shapes[name]) for name in names)
    return ByHeads(beta.replace(".in_proj_b.", ".in_proj_ba."), parts, both, shapes[beta][1:])


def _convolution(name: str, shapes: Shapes, config: HFConfig) -> Op:
    return ByHeads(name, tuple(qkv_heads(name, config)), ((name, shapes[name]),), shapes[name][1:])


def _experts(prefix: str, kind: str, shapes: Shapes) -> Op | None:
    """The stack over all experts that begins with expert 0's tensor `kind`."""
    if kind not in _STACKS:
        return None
    param, parts, cut = _STACKS[kind]
    count = sum(name.startswith(f"{prefix}.") and name.endswith(f".{kind}.weight") for name in shapes)
    rows, columns = shapes[f"{prefix}.0.{kind}.weight"]
    names = tuple(f"{prefix}.{{}}.{part}.weight" for part in parts)
    return StackedExperts(f"{prefix}.{param}", names, count, (rows, columns), cut)


def _keys_of_indexer(wk: str, shapes: Shapes, config: HFConfig) -> Op:
    """SGLang fuses what an indexer reads, on GPUs, if its rope turns pairs (`use_dsa_indexer_fusion`)."""
    if not config.get("indexer_rope_interleave"):
        return Rename(wk, wk, shapes[wk])
    gates = wk.replace(".wk.", ".weights_proj.")
    rows = tuple((name, shapes[name][0]) for name in (wk, gates))
    return StackedRows(wk.replace(".wk.", ".wk_weights_proj."), rows, shapes[wk][1], own_dtype="bfloat16")


def _gates_of_indexer(name: str, shapes: Shapes, config: HFConfig) -> Op | None:
    is_fused = config.get("indexer_rope_interleave")
    return None if is_fused else Rename(name, name, shapes[name], own_dtype="bfloat16")


_FUSED: Mapping[str, Callable[[str, Shapes, HFConfig], Op | None]] = {
    "q_proj": _qkv,
    "gate_proj": _gate_up,
    "q_a_proj": _latents,
    "in_proj_qkv": _delta_inputs,
    "in_proj_b": _delta_gates,
    "conv1d": _convolution,
    "wk": _keys_of_indexer,
    "weights_proj": _gates_of_indexer,
}
