"""What SGLang 0.5.23 reads in a config.json in another way than transformers does, or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.arch.layout import has_states

# Families whose parameters in it have no table (weights/mapping/server_map.py): of a Mamba mixer it holds -exp(A_log).
UNKNOWN = ("nemotron_h",)
OVERRIDE = "--json-model-override-args"
# Its class of Qwen3-Next, which Qwen3.5 shares, reads them beside `layer_types` and `rope_parameters`, where
# transformers 5 writes them no more.
_KEYS = ("full_attention_interval", "rope_theta", "partial_rotary_factor")


def overrides(hf: Mapping[str, Any]) -> str:
    """The value of OVERRIDE for a `completed` config.json; "" if SGLang reads all of it."""
    if not _has_delta_nets(hf):
        return ""
    rope = hf["rope_parameters"]
    values = (_interval(hf), rope["rope_theta"], rope.get("partial_rotary_factor", 1.0))
    return json.dumps(dict(zip(_KEYS, values, strict=True)))


def is_override(value: object) -> bool:
    """Whether a server that says so of OVERRIDE was told what `overrides` tells."""
    try:
        told = json.loads(str(value))
    except ValueError:
        return False
    return isinstance(told, dict) and told.keys() == set(_KEYS)


def misread(hf: Mapping[str, Any]) -> Iterator[str]:
    """Why SGLang would serve another model than the `completed` config.json says, or hold what no push can verify."""
    if hf.get("model_type") in UNKNOWN:
        yield f"SGLang's parameters of {hf['model_type']}, by which a push is verified, are not known here yet"
    if _has_delta_nets(hf):
        kinds, interval = hf["layer_types"], _interval(hf)
        if any((kind == "full_attention") != ((i + 1) % interval == 0) for i, kind in enumerate(kinds)):
            where = f"in layers {interval}, {2 * interval} and so on"
            yield f"SGLang has full attention {where}, and layer_types says otherwise"
    if hf.get("model_type") in ("qwen3_moe", "qwen3_next") and not _all_sparse(hf):
        yield "SGLang gives every layer experts, and num_experts, decoder_sparse_step or mlp_only_layers say otherwise"
    if hf.get("model_type") == "qwen3_next" and hf.get("tie_word_embeddings"):
        yield "SGLang gives Qwen3-Next output rows of its own, and tie_word_embeddings says true"


def wants_gpus(hf: Mapping[str, Any]) -> Iterator[str]:
    """Why SGLang serves this model on GPUs only."""
    if hf.get("model_type") == "gpt_oss":
        yield "without a GPU SGLang has no attention sinks, which gpt_oss needs"
    if hf.get("index_topk"):
        yield f"without a GPU SGLang has no indexers, which {hf['model_type']} needs"


def _has_delta_nets(hf: Mapping[str, Any]) -> bool:
    return has_states(hf) and "linear_num_key_heads" in hf


def _interval(hf: Mapping[str, Any]) -> int:
    """The number of the first layer with full attention, from 1 on; one more than layers if there is none."""
    return [*hf["layer_types"], "full_attention"].index("full_attention") + 1


def _all_sparse(hf: Mapping[str, Any]) -> bool:
    return hf.get("num_experts") != 0 and hf.get("decoder_sparse_step", 1) == 1 and not hf.get("mlp_only_layers")
