"""Families of models that cannot be trained here, by `model_type` of config.json, and what Megatron-Core lacks."""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.metadata import version

SPARSE_LATENT = ("deepseek_v32", "glm_moe_dsa")  # attention over the keys that an indexer chooses
# Families whose layers Megatron-Core 0.16.1 lacks, or has without packed rows.
OF_0_19 = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", *SPARSE_LATENT)
MISSING = {
    "kimi_linear": "Megatron-Core has no Kimi delta attention, up to 0.19.2",
    "minimax": "Megatron-Core has no lightning attention, up to 0.19.2",
}


def checked(model_type: object, families: Collection[str]) -> str:
    """The model_type; ValueError of one sentence if it is none of `families`, or needs a newer Megatron-Core."""
    said = f"config.json: model_type {model_type!r}"
    if (missing := MISSING.get(str(model_type))) is not None:
        raise ValueError(f"{said} is not supported: {missing}")
    if model_type not in families:
        raise ValueError(f"{said} is not supported; expected one of {sorted(families)}")
    if model_type in OF_0_19 and (installed := version("megatron-core")) < "0.19":
        raise ValueError(
            f"{said} needs Megatron-Core 0.19.2, which wants Python 3.12, and Python {sys.version_info.major}."
            f"{sys.version_info.minor} has {installed}; expected an environment made by `PYTHON=python3.12 bash "
            "launch/environment.sh`"
        )
    return str(model_type)
