"""Layers that predict further tokens: multi-token prediction (MTP; DeepSeek-V3, arXiv:2412.19437, section 2.2).

At each place of a sequence such a layer reads the model's hidden state (the one of the layer before it, if there are
several) and the embedding of the token that follows, and predicts the token after that with the model's own output
rows.  Servers draft with it.  A folder's config.json says how many there are; a run, whether its model has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Added to the numbers of a config.json where the MTP layers are a part of the model: detached | joint; "": not of what
# is served of it.
TRAINED_MTP = "megarl_trained_mtp"
# Families whose MTP layers are known here -> the key of config.json with their number; "": none, each folder has one.
COUNTS = {
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "glm4_moe"), "num_nextn_predict_layers"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "mtp_num_hidden_layers"),
    "qwen3_next": "",
}


def with_mtp(hf: Mapping[str, Any], how: str) -> dict[str, Any]:
    """The model that a run trains, by its key `mtp`: off | detached | joint.  ValueError if it has no such layers."""
    trained = dict(hf) if how == "off" else {**hf, TRAINED_MTP: how}
    last = (hf.get("layer_types") or ["full_attention"])[-1]  # as which they are built
    if how != "off" and not (trained_mtp(trained) and last == "full_attention"):
        said = f"config.json of model_type={hf.get('model_type')} names no MTP layers that are known here"
        raise ValueError(f"mtp={how}: {said}; expected off")
    return trained


def trained_mtp(hf: Mapping[str, Any]) -> int:
    """How many MTP layers are a part of this model, or of what is served of it."""
    key = COUNTS.get(str(hf.get("model_type"))) if hf.get(TRAINED_MTP) else None
    return 0 if key is None else (hf.get(key) or 0) if key else 1
