"""What the ranks of test_expert_shards.py run: a model with experts saved under one layout and loaded under others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from shards_cases import LAYOUTS, Trained

from megarl.layout import Layout
from megarl.mcore.checkpoint import checkpoint

LAYOUTS |= {
    "ep2": Layout(ep=2),
    "ep2 etp1": Layout(tp=2, sequence_parallel=True, ep=2, etp=1),
    "ep2 sharded": Layout(ep=2, use_distributed_optimizer=True),
    "ep2 etp1 sharded": Layout(tp=2, sequence_parallel=True, ep=2, etp=1, use_distributed_optimizer=True),
}


def trained_elsewhere(folder: str, root: str, first: str, then: str) -> dict[str, Any]:
    """Weights and moments at a save, and weights after one more step: of the model saved, and of the one loaded."""
    where, found = Path(root) / f"{first} {then}", {}
    trained = Trained(folder, LAYOUTS[first], "smooth adamw", "float32", "actor")
    trained.step()
    checkpoint.save(where, trained.model, trained.optimizer)
    found["saved"], found["saved moments"] = trained.weights(), trained.moments()
    trained.step()
    found["saved, one more"] = trained.weights()
    trained.close()
    loaded = Trained(folder, LAYOUTS[then], "smooth adamw", "float32", "actor", scale=0.5)
    checkpoint.load(where, loaded.model, loaded.optimizer)
    found["loaded"], found["loaded moments"] = loaded.weights(), loaded.moments()
    loaded.step()
    found["loaded, one more"] = loaded.weights()
    loaded.close()
    return found if dist.get_rank() == 0 else {}


def weights_elsewhere(folder: str, root: str) -> dict[str, Any]:
    """A frozen model goes from one way of dealing experts to any other."""
    where, found = Path(root) / "frozen", {}
    for name in ("ep2", "pp2", "ep2 etp1"):
        model = Trained(folder, LAYOUTS[name], "adamw", "float32", "actor", scale=1.0 if name == "ep2" else 0.5)
        if name == "ep2":
            checkpoint.save(where, model.model, None)
        else:
            checkpoint.load(where, model.model, None)
        found[name] = model.weights()
        model.close()
    return found


def all_cases(folder: str, root: str, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {f"{first} {then}": trained_elsewhere(folder, root, first, then) for first, then in pairs}
    return found | {"frozen": weights_elsewhere(folder, root)}
