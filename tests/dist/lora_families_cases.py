"""What the ranks of test_lora_families.py run, and adapters with known numbers to start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lora_cases import one_layout, resumed
from safetensors.torch import save_file

from megarl.layout import Layout
from megarl.mcore.models.lora import LoraSettings
from megarl.weights.hf.adapter import adapter_table, module_names, peft_config

RANK, ALPHA = 4, 10.0


def write_adapter(folder: Path, out: Path, settings: LoraSettings) -> Path:
    """An adapter in PEFT's format for the model in `folder`: neither A nor B zero, the same numbers every time."""
    hf = json.loads((folder / "config.json").read_text())
    generator = torch.Generator().manual_seed(2)
    tensors = {
        name: (0.2 if "lora_A" in name else 0.1) * torch.randn(shape, generator=generator)
        for op in adapter_table(hf, settings)
        for name, shape in op.hf_shapes.items()
    }
    out.mkdir()
    save_file(tensors, out / "adapter_model.safetensors", {"format": "pt"})
    config = peft_config(settings, str(folder), list(module_names(hf, settings)))
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


def run_layouts(root: str, out: str, cases: list[tuple[str, str, Layout]]) -> dict[str, Any]:
    """family/name -> everything about the family's model under this layout."""
    found: dict[str, Any] = {}
    for family, name, layout in cases:
        key = f"{family}/{name}"
        found[key] = one_layout(f"{root}/{family}", f"{root}/{family} adapter", f"{out}/{key}", layout)
    return found


def run_checkpoints(root: str, out: str, cases: dict[str, tuple[str, Layout, Layout]]) -> dict[str, Any]:
    """Resumed runs, by name: (family, the layout that saves, the layout that loads)."""
    return {
        name: resumed(f"{root}/{family}", f"{out}/{name}", first, then, "float32")
        for name, (family, first, then) in cases.items()
    }
