"""What the ranks of a server hold, in the words of `names`: the parameters' own names, and the HF tensors inside.

The CPU server holds HF tensors as they are.  SGLang fuses some of them into one parameter and cuts most over its ranks;
how, is read off the HF names, which say the same for every family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

from megarl.weights.mapping.names import GateUp, Op, Rename, Shape, ShardCoordinate
from megarl.weights.mapping.server_ops import StackedExperts, StackedQKV, StackedRows, StackedVocab
from megarl.weights.mapping.tables import HFConfig, table_for

EngineKind = Literal["cpu", "sglang"]
Shapes = Mapping[str, Shape]

_CUT_BY_COLUMNS = re.compile(r"\.(o_proj|down_proj)\.weight$")
_CUT_BY_ROWS = re.compile(r"\.(q_b_proj|kv_b_proj)\.weight$")
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(\w+)\.weight$")
# of an expert's tensors: those that begin a stack, the parameter, what lies over one another in it, and the cut
_STACKS: Mapping[str, tuple[str, tuple[str, ...], int]] = {
    "gate_proj": ("w13_weight", ("gate_proj", "up_proj"), 0),
    "w1": ("w13_weight", ("w1", "w3"), 0),
    "down_proj": ("w2_weight", ("down_proj",), 1),
    "w2": ("w2_weight", ("w2",), 1),
}


def server_table(engine: EngineKind, hf_config: HFConfig) -> list[Op]:
    """Every parameter of the server's model, under the server's names, in the order of the trainer's export."""
    shapes = {name: shape for op in table_for(hf_config) for name, shape in op.hf_shapes.items()}
    if engine == "cpu":
        return [Rename(name, name, shape) for name, shape in shapes.items()]
    return [op for name in shapes if (op := _sglang(name, shapes, hf_config)) is not None]


def coordinates(tp: int, ep: int = 1) -> list[ShardCoordinate]:
    """Where each rank of an SGLang server stands: experts are dealt to `ep` groups of neighbouring ranks."""
    etp = tp // ep
    return [ShardCoordinate(rank, tp, rank // etp, ep, rank % etp, etp) for rank in range(tp)]


def is_enlarged(engine: EngineKind, hf_config: HFConfig, tp: int) -> bool:
    """Whether an SGLang server without GPU makes the model larger than it is, so that it divides over its ranks.

    It rounds feed-forward sizes up to 32 a rank, and numbers of heads up to one a rank.
    """
    if engine == "cpu":
        return False
    sizes = [hf_config.get(key) or 0 for key in ("intermediate_size", "moe_intermediate_size")]
    heads = [hf_config["num_attention_heads"], hf_config.get("num_key_value_heads") or tp]
    return any(size % (32 * tp) for size in sizes) or any(count % tp for count in heads)


def _sglang(name: str, shapes: Shapes, config: HFConfig) -> Op | None:
    """The parameter that begins with the tensor `name`; None where another tensor begins it."""
    shape = shapes[name]
    if re.search(r"(embed_tokens|lm_head)\.weight$", name):
        return StackedVocab(name, name, *shape)
    if found := _EXPERT.match(name):
        return _experts(found[1], found[3], shapes) if found[2] == "0" else None
    for part, make in _FUSED.items():
        if f".{part}." in name:
            return make(name, shapes, config)
    if any(f".{part}." in name for part in ("k_proj", "v_proj", "up_proj")):
        return None
    if ".kv_a_proj_with_mqa." in name and name.replace(".kv_a_proj_with_mqa.", ".q_a_proj.") in shapes:
        return None
    if _CUT_BY_COLUMNS.search(name):
        return Rename(name, name, shape, 1)
    return Rename(name, name, shape, 0 if _CUT_BY_ROWS.search(name) else None)


def _qkv(q: str, shapes: Shapes, config: HFConfig) -> Op:
    k, v = (q.replace(".q_proj.", f".{x}_proj.") for x in "kv")
    if k not in shapes:  # of latent attention: alone
        return Rename(q, q, shapes[q], 0)
    heads = config["num_attention_heads"]
    head_dim = shapes[q][0] // heads
    width = shapes[q][1] if len(shapes[q]) == 2 else None
    return StackedQKV(q.replace(".q_proj.", ".qkv_proj."), q, k, v, heads, shapes[k][0] // head_dim, head_dim, width)


def _gate_up(gate: str, shapes: Shapes, _: HFConfig) -> Op:
    param, up = (gate.replace(".gate_proj.", f".{x}.") for x in ("gate_up_proj", "up_proj"))
    return GateUp(param, gate, up, *shapes[gate])


def _latents(q_a: str, shapes: Shapes, _: HFConfig) -> Op:
    """Latent attention's two projections down, whole on every rank."""
    kv_a = q_a.replace(".q_a_proj.", ".kv_a_proj_with_mqa.")
    rows = ((q_a, shapes[q_a][0]), (kv_a, shapes[kv_a][0]))
    return StackedRows(q_a.replace(".q_a_proj.", ".fused_qkv_a_proj_with_mqa."), rows, shapes[q_a][1], is_cut=False)


def _experts(prefix: str, kind: str, shapes: Shapes) -> Op | None:
    """The stack over all experts that begins with expert 0's tensor `kind`."""
    if kind not in _STACKS:
        return None
    param, parts, cut = _STACKS[kind]
    count = sum(name.startswith(f"{prefix}.") and name.endswith(f".{kind}.weight") for name in shapes)
    rows, columns = shapes[f"{prefix}.0.{kind}.weight"]
    names = tuple(f"{prefix}.{{}}.{part}.weight" for part in parts)
    return StackedExperts(f"{prefix}.{param}", names, count, (rows, columns), cut)


_FUSED: Mapping[str, Callable[[str, Shapes, HFConfig], Op]] = {
    "q_proj": _qkv,
    "gate_proj": _gate_up,
    "q_a_proj": _latents,
}
