"""Families of models that cannot be trained here, by `model_type` of config.json, and what Megatron-Core lacks."""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.metadata import version

SPARSE_LATENT = ("deepseek_v32", "glm_moe_dsa")  # attention over the keys that an indexer chooses
# Families whose layers Megatron-Core 0.16.1 lacks, or has without packed rows.
OF_0_19 = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", *SPARSE_LATENT, "nemotron_h")
_WITH_VISION = "of models with a vision part those of Qwen3.5 alone are read, by their text part"
MISSING = {
    "kimi_linear": "Megatron-Core has no Kimi delta attention, up to 0.19.2",
    "minimax": "Megatron-Core has no lightning attention, up to 0.19.2",
    "deepseek_v4": "Megatron-Core has neither its compressed attention nor its hyper-connections, up to 0.19.2",
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "glm5_next", "kimi_k25"), _WITH_VISION),
    **dict.fromkeys(("nemotron_h_omni", "inkling_mm_model", "inkling2", "minimax_m3_vl"), _WITH_VISION),
    **dict.fromkeys(("gemma3", "gemma4"), _WITH_VISION),
}


def known(model_type: object, families: Collection[str]) -> str:
    """The model_type; ValueError of one sentence if it is none of `families`."""
    said = f"config.json: model_type {model_type!r}"
    if (missing := MISSING.get(str(model_type))) is not None:
        raise ValueError(f"{said} is not supported: {missing}")
    if model_type not in families:
        raise ValueError(f"{said} is not supported; expected one of {sorted(families)}")
    return str(model_type)


def checked(model_type: object, families: Collection[str]) -> str:
    """As `known`; also if it needs a newer Megatron-Core than the one that is installed."""
    if lacking := needs_newer(known(model_type, families)):
        raise ValueError(f"config.json: {lacking}")
    return str(model_type)


def needs_newer(model_type: str, mtp: str = "off") -> str:
    """A sentence if such a model can be planned but not trained in this environment, or not its MTP layers, else ""."""
    what = f"model_type {model_type!r}" if model_type in OF_0_19 else "" if mtp == "off" else f"actor.mtp={mtp}"
    if not what or tuple(map(int, (installed := version("megatron-core")).split(".")[:2])) >= (0, 19):
        return ""
    return (
        f"{what} needs Megatron-Core 0.19.2, which wants Python 3.12, and Python "
        f"{sys.version_info.major}.{sys.version_info.minor} has {installed}; expected an environment made by "
        "`PYTHON=python3.12 bash launch/environment.sh`"
    )
