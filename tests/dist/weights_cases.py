"""What the ranks of the weight tests run; without transformers, which would only make them start later."""

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
from megarl.weights.hf.gather import local_parameters
from megarl.weights.hf.load import load_hf

MODELS = [(family, tied) for family in ("qwen2", "qwen3") for tied in (False, True)]
LAYOUTS = {
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "dp2": Layout(),
    "pp2 vpp2": Layout(pp=2, vpp=2),
    "pp2 uneven": Layout(pp=2, last_stage_layers=1),
}
LENGTHS = [7, 5]


def model_name(family: str, tied: bool) -> str:
    return f"{family}_{'tied' if tied else 'untied'}"


def tokens() -> torch.Tensor:
    return torch.randint(0, 45, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))


def all_cases(root: str) -> dict[str, Any]:

    found: dict[str, Any] = {}
    for layout_name, layout in LAYOUTS.items():
        make_groups(layout)
        for family, tied in MODELS:
            found[f"{layout_name}/{model_name(family, tied)}"] = _actor_case(
                Path(root), layout, layout_name, family, tied
            )
        found[f"{layout_name}/critic"] = _critic_case(Path(root), layout, layout_name)
        found[f"{layout_name}/bf16"] = _bf16_case(Path(root), layout)
        destroy_groups()
    return found


def _actor_case(root: Path, layout: Layout, layout_name: str, family: str, tied: bool) -> dict[str, Any]:

    source = root / model_name(family, tied)
    config = json.loads((source / "config.json").read_text())
    model = build_model(config, layout)
    load_hf(model, source, config)
    out = {name: tensor.clone() for name, tensor in hf_tensors(model, config, buffer_bytes=20_000)}
    save_hf(model, config, root / f"saved_{layout_name}_{source.name}", source_folder=source, shard_bytes=30_000)
    batch = Batch(tokens(), torch.tensor(LENGTHS))
    columns = forward_only(model, [MicroBatch(batch)], Outputs(layout, config["vocab_size"]), torch.device("cpu"))
    return {"tensors": out, "log_probs": columns[0]["log_probs"] if columns else None}


def _critic_case(root: Path, layout: Layout, layout_name: str) -> dict[str, Any]:
    """A critic from an actor's folder; then with another head, saved and loaded again."""

    source = root / "qwen3_tied"
    config = json.loads((source / "config.json").read_text())
    model = build_model(config, layout, role="critic")
    load_hf(model, source, config, role="critic")
    first = dict(hf_tensors(model, config, role="critic"))["score.weight"].clone()
    for name, param in local_parameters(model).items():
        if name == "output_layer.weight":
            param.copy_(torch.arange(32.0)[None])
    folder = root / f"critic_{layout_name}"
    save_hf(model, config, folder, source_folder=source, role="critic")
    torch.distributed.barrier()
    again = build_model(config, layout, role="critic")
    load_hf(again, folder, config, role="critic")
    return {"head": first, "tensors": {n: t.clone() for n, t in hf_tensors(again, config, role="critic")}}


def _bf16_case(root: Path, layout: Layout) -> dict[str, torch.dtype]:
    """A bf16 model (wrapped in Float16Module) keeps its type on the way out unless another is asked for."""

    config = json.loads((root / "qwen2_tied/config.json").read_text())
    model = build_model(config, layout, dtype="bfloat16")
    load_hf(model, root / "qwen2_tied", config)
    own = {n: t.clone() for n, t in hf_tensors(model, config)}
    assert {n: (tuple(t.shape), t.dtype) for n, t in own.items()} == hf_sizes(model, config)
    assert {t.dtype for _, t in hf_tensors(model, config, dtype=torch.float32)} == {torch.float32}
    return own
