"""config.json of a folder as transformers reads it, without running code from the folder."""

from __future__ import annotations

from transformers import AutoConfig, PretrainedConfig

# Families whose class is code in their repositories -> the family of transformers whose model they are.
SAME_MODEL = {"kimi_k2": "deepseek_v3"}


def read_config(folder: str) -> PretrainedConfig:
    """For transformers' classes, as `config=`.  A folder of SAME_MODEL is read as the family of transformers."""
    held, _ = PretrainedConfig.get_config_dict(folder, local_files_only=True)
    family = SAME_MODEL.get(held.get("model_type", ""))
    if family is None:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    return AutoConfig.for_model(family, **{key: held[key] for key in held.keys() - {"model_type", "auto_map"}})
