"""MTP layers (`arch/mtp.py`) as mappings: the block is one of the model's own layers under other names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from megarl.arch.mtp import COUNTS, block_like, num_mtp, trained_mtp
from megarl.weights.mapping.blocks import HFConfig
from megarl.weights.mapping.names import Op, Rename

MTP_PREFIX = "mtp."  # of parameters in Megatron, and of HF names where the layers are not numbered after the others
# HF names of what an MTP layer has beside its block, by the parameter in Megatron; {}: the layer's prefix.
_NUMBERED = {
    "eh_proj": "{}.eh_proj",
    "enorm": "{}.enorm",
    "hnorm": "{}.hnorm",
    "final_layernorm": "{}.shared_head.norm",
}
_ONLY = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "final_layernorm": "mtp.norm",
}


def _follow_the_layers(c: HFConfig) -> bool:
    """Whether the folder numbers them after the model's own layers, as DeepSeek's does; Qwen's have another prefix."""
    return COUNTS.get(c["model_type"]) == "num_nextn_predict_layers"


def _prefix(c: HFConfig, number: int) -> str:
    return (
        f"model.layers.{c['num_hidden_layers'] + number}" if _follow_the_layers(c) else f"{MTP_PREFIX}layers.{number}"
    )


def shared_copies(c: HFConfig) -> dict[str, str]:
    """HF names under which a folder's MTP layers may hold the model's embedding and output rows again -> their own."""
    if not _follow_the_layers(c):
        return {}
    names = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    return {f"{_prefix(c, i)}.{copy}": own for i in range(num_mtp(c)) for copy, own in names.items()}


def mtp_layers(
    c: HFConfig, layer: Callable[[HFConfig, int], list[Op]], biases: Callable[[HFConfig], Iterable[Op]]
) -> Iterator[Op]:
    """Those that are a part of the model: for each, what is before its block, the block, its router's bias, the norm.

    `layer`, `biases`: of the family.
    """
    hidden, like = c["hidden_size"], block_like(c)
    block = [*layer(c, like), *(op for op in biases(c) if op.layer == like)] if trained_mtp(c) else []
    for number in range(trained_mtp(c)):
        prefix, mg = _prefix(c, number), f"mtp.layers.{number}"
        names = _NUMBERED if _follow_the_layers(c) else _ONLY
        own = {part: f"{name.format(prefix)}.weight" for part, name in names.items()}
        yield Rename(f"{mg}.eh_proj.weight", own["eh_proj"], (hidden, 2 * hidden), 0)
        yield from (Rename(f"{mg}.{norm}.weight", own[norm], (hidden,)) for norm in ("enorm", "hnorm"))
        moves = {f"decoder.layers.{like}.": f"{mg}.mtp_model_layer.", f"model.layers.{like}.": f"{prefix}."}
        yield from (op.moved(moves) for op in block)
        yield Rename(f"{mg}.final_layernorm.weight", own["final_layernorm"], (hidden,))
