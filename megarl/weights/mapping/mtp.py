"""MTP layers (`arch/mtp.py`) as mappings: the block is one of the model's own layers under other names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megarl.arch.mtp import COUNTS, trained_mtp
from megarl.weights.mapping.blocks import HFConfig, is_tied
from megarl.weights.mapping.names import Op, Rename

MTP_PREFIX = "mtp."  # of parameters in Megatron, and of HF names where the layers are not numbered after the others
# What an MTP layer has beside its block: the parameter in Megatron -> its HF name below the layer's, and Qwen's.
_OWN = {
    "eh_proj": ("eh_proj", "mtp.fc"),
    "enorm": ("enorm", "mtp.pre_fc_norm_embedding"),
    "hnorm": ("hnorm", "mtp.pre_fc_norm_hidden"),
    "final_layernorm": ("shared_head.norm", "mtp.norm"),
}


def _follow_the_layers(c: HFConfig) -> bool:
    """Whether the folder numbers them after the model's own layers, as DeepSeek's does; Qwen's have another prefix."""
    return COUNTS.get(c["model_type"]) == "num_nextn_predict_layers"


def _prefix(c: HFConfig, number: int) -> str:
    return f"model.layers.{c['num_hidden_layers'] + number}" if _follow_the_layers(c) else f"mtp.layers.{number}"


def shared_copies(c: HFConfig) -> dict[str, str]:
    """HF names under which a folder may hold embedding and output rows again, if MTP layers are trained -> the model's
    own names."""
    if not _follow_the_layers(c):
        return {}
    names = dict(zip(("embed_tokens", "shared_head.head"), _embedding_and_head(c), strict=True))
    return {f"{_prefix(c, i)}.{copy}.weight": own for i in range(trained_mtp(c)) for copy, own in names.items()}


def _embedding_and_head(c: HFConfig) -> tuple[str, str]:
    embedding = "model.embed_tokens.weight"
    return embedding, embedding if is_tied(c) else "lm_head.weight"


def in_draft(c: HFConfig, name: str) -> str | None:
    """The name in SGLang's draft model, as its checksums have it, of what in the model would be `name`; None: of none.

    Its classes are Qwen3NextForCausalLMMTP and Qwen3_5ForCausalLMMTP, or DeepseekV3ForCausalLMNextN and Glm4Moe's.
    """
    prefix = f"{_prefix(c, 0)}." if _follow_the_layers(c) else MTP_PREFIX
    if not trained_mtp(c) or not name.startswith(prefix):
        return None
    own = name.removeprefix(prefix)
    if not _follow_the_layers(c):
        return f"draft.{own}" if own.startswith(("fc.", "pre_fc_norm_")) else f"draft.model.{own}"
    is_of_block = not own.startswith(tuple(numbered for numbered, _ in _OWN.values()))
    return f"draft.model.decoder.{own}" if is_of_block else f"draft.model.{own}"


def shared_in_draft(c: HFConfig) -> dict[str, str]:
    """Names in the draft model of the embedding and the output rows that it shares -> the model's own names."""
    names = ("draft.model.embed_tokens.weight", "draft.lm_head.weight")
    return dict(zip(names, _embedding_and_head(c), strict=True)) if trained_mtp(c) else {}


def mtp_layers(c: HFConfig, layer: Callable[[HFConfig, int], list[Op]]) -> Iterator[Op]:
    """Those that are a part of the model: of each its projection, its norms, and its block.

    `layer`: the family's.  A block is as the last layer of the model.
    """
    hidden, like = c["hidden_size"], c["num_hidden_layers"] - 1
    block = layer(c, like) if trained_mtp(c) else []
    for number in range(trained_mtp(c)):
        prefix, param = _prefix(c, number), f"mtp.layers.{number}"
        for own, (numbered, only) in _OWN.items():
            name = f"{prefix}.{numbered}.weight" if _follow_the_layers(c) else f"{only}.weight"
            shape, dim = ((hidden, 2 * hidden), 0) if own == "eh_proj" else ((hidden,), None)
            yield Rename(f"{param}.{own}.weight", name, shape, dim)
        moves = {f"decoder.layers.{like}.": f"{param}.mtp_model_layer.", f"model.layers.{like}.": f"{prefix}."}
        yield from (op.moved(moves) for op in block)
