"""Adapters that `peft` wrote, loaded into a model of ours: what `save_peft` writes is read back with it."""

import json
from pathlib import Path

from safetensors import safe_open

from megarl.mcore.models.lora import LoraSettings
from megarl.mcore.models.model import Model
from megarl.weights.hf.adapter import CONFIG, WEIGHTS, adapter_parameters, adapter_table, module_names
from megarl.weights.hf.folder import HFFolder
from megarl.weights.hf.gather import ModelParallel
from megarl.weights.hf.load import check_names, fill
from megarl.weights.mapping.blocks import HFConfig


def peft_settings(folder: str | Path, hf_config: HFConfig) -> LoraSettings:
    """Rank, alpha and projections of a PEFT folder."""
    config = json.loads((Path(folder) / CONFIG).read_text())
    known = module_names(hf_config, LoraSettings(1, 1.0))
    targets = dict.fromkeys(known[target] for target in config["target_modules"])
    return LoraSettings(config["r"], config["lora_alpha"], tuple(targets))


def load_peft(model: Model, hf_config: HFConfig, folder: str | Path) -> None:
    """Load the adapters of this rank; no communication."""
    table, path = adapter_table(hf_config, peft_settings(folder, hf_config)), Path(folder) / WEIGHTS
    with safe_open(path, framework="pt", device="cpu") as file:
        stored = HFFolder(Path(folder), {path: file})
        check_names(stored, table, set())
        fill(adapter_parameters(model), table, stored, ModelParallel.current().coordinate)
