"""Families of models that cannot be trained here, by `model_type` of config.json, and what Megatron-Core lacks."""

from __future__ import annotations

from collections.abc import Iterable

_DELTA = "Megatron-Core 0.16.1 has its gated delta net without packed rows, and 0.18.0 is the first with them"
_SPARSE = "Megatron-Core 0.16.1 has its sparse attention without packed rows, and 0.19.0 is the first with them"
MISSING = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _DELTA),
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "kimi_linear": "Megatron-Core has no Kimi delta attention, up to 0.19.2",
    "minimax": "Megatron-Core has no lightning attention, up to 0.19.2",
}


def refusal(model_type: object, families: Iterable[str]) -> str:
    """The sentence for a model that is of none of `families`."""
    said = f"config.json: model_type {model_type!r} is not supported"
    if (missing := MISSING.get(str(model_type))) is not None:
        return f"{said}: {missing}"
    return f"{said}; expected one of {sorted(families)}"
