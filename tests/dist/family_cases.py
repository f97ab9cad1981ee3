"""What the ranks of the family tests run: a family under a layout, its weights on the way out, and its log-probs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megarl.batch import Batch, MicroBatch
from megarl.layout import Layout
from megarl.mcore.models.model import build_model
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.mcore.training.step import Outputs, forward_only
from megarl.weights.hf.export import hf_sizes, hf_tensors, save_hf
from megarl.weights.hf.load import load_hf

Case = tuple[str, str, dict[str, Any]]  # family, name of a layout, the layout
LENGTHS = [9, 1, 6, 12]


def tokens() -> torch.Tensor:
    return torch.randint(0, 45, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))


def run_cases(root: str, cases: list[Case]) -> dict[str, Any]:
    """ "family/layout" -> what this rank saw."""
    return {f"{family}/{name}": one_case(Path(root), family, name, Layout(**layout)) for family, name, layout in cases}


def one_case(root: Path, family: str, layout_name: str, layout: Layout) -> dict[str, Any]:
    where = make_groups(layout)
    try:
        source = root / family
        config = json.loads((source / "config.json").read_text())
        model = build_model(config, layout)
        load_hf(model, source, config)
        found = {name: tensor.clone() for name, tensor in hf_tensors(model, config, buffer_bytes=5_000)}
        assert {n: (tuple(t.shape), t.dtype) for n, t in found.items()} == hf_sizes(model, config)
        save_hf(model, config, root / f"{family}_{layout_name}", source_folder=source, shard_bytes=30_000)
        micro = MicroBatch(Batch(tokens(), torch.tensor(LENGTHS)))
        columns = forward_only(model, [micro], Outputs(layout, config["vocab_size"]), torch.device("cpu"))
        return {"tensors": found, "log_probs": columns[0]["log_probs"] if where.is_reporter else None}
    finally:
        destroy_groups()
