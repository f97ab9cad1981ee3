"""config.json for transformers' classes, without running code from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from transformers import AutoConfig, PretrainedConfig

# Families whose class is code in their repositories -> the family of transformers whose model they are.
SAME_MODEL = {"kimi_k2": "deepseek_v3"}


def read_config(folder: str) -> PretrainedConfig:
    """Of a folder, as transformers reads it; one of SAME_MODEL as the family of transformers."""
    held, _ = PretrainedConfig.get_config_dict(folder, local_files_only=True)
    if held.get("model_type") not in SAME_MODEL:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    return config_of(held)


def config_of(hf: Mapping[str, Any]) -> PretrainedConfig:
    """Of the numbers of a config.json, which transformers would write into."""
    family = SAME_MODEL.get(hf["model_type"], hf["model_type"])
    return AutoConfig.for_model(family, **{key: deepcopy(hf[key]) for key in hf.keys() - {"model_type", "auto_map"}})
