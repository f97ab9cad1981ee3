"""Sharded checkpoints by Megatron's own dist_checkpointing: weights and optimizer, loadable into another layout.

For a model with adapters only the adapters are written, with a digest of the base model.  The base never changes and
is loaded from its HF folder.
"""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import nn

from megarl.mcore.models import lora
from megarl.mcore.models.model import Model, unwrap
from megarl.mcore.models.transformer_engine import without_extra_state
from megarl.mcore.training.optimizer import Optimizer


def save(folder: Path, model: Model, optimizer: Optimizer | None) -> None:
    """Write this rank's shards; every rank of the group calls it.  `folder` must not hold a checkpoint yet."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    # Megatron passes results through a Manager, a process that stays behind if its rank dies; a synchronous save needs
    # only a queue.
    with mock.patch.object(filesystem_async, "_results_queue", queue.Queue()):
        dist_checkpointing.save(_state(model, optimizer, is_loading=False), str(folder))


def load(folder: Path, model: Model, optimizer: Optimizer | None) -> None:
    """Fill the model and a new optimizer from a checkpoint, whatever layout wrote it.

    Raises a ValueError if the folder holds no checkpoint, or one of another kind of optimizer, or of adapters that
    differ from the model's or belong to another base model.
    """
    if not (folder / "metadata.json").exists():
        raise ValueError(f"{folder}: there is no checkpoint here; expected a folder that a save has finished")
    common = dist_checkpointing.load_common_state_dict(str(folder))
    _check_adapters(folder, common["adapters"], lora.identity(model))
    if optimizer is not None:
        optimizer.step_index = _saved_step(folder, common, optimizer.kind)
    state = dist_checkpointing.load(_state(model, optimizer, is_loading=True), str(folder))
    for i, chunk in enumerate(model):
        found = unwrap(chunk).load_state_dict(state["model"][str(i)], strict=False)
        lacking = without_extra_state(dict.fromkeys(found.missing_keys)) if common["adapters"] is None else {}
        assert not (found.unexpected_keys or lacking), f"{folder}: {found.unexpected_keys} too many, {lacking} missing"
    if optimizer is not None and optimizer.step_index:
        optimizer.inner.load_state_dict(state["optimizer"])
    elif optimizer is not None:
        optimizer.inner.reload_model_params()  # the float32 master weights of bf16 weights


def adapters_in(folder: Path) -> dict[str, Any] | None:
    """The description of a checkpoint's adapters (`lora.identity`); None: it holds a whole model."""
    found: dict[str, Any] | None = dist_checkpointing.load_common_state_dict(str(folder))["adapters"]
    return found


def _saved_step(folder: Path, common: dict[str, Any], kind: str) -> int:
    if common["step_index"] and common["kind"] != kind:
        raise ValueError(
            f"{folder}: its optimizer had {common['kind']}, this one has {kind}; expected the same settings"
        )
    return common["step_index"]


def _check_adapters(folder: Path, saved: dict[str, Any] | None, own: dict[str, Any] | None) -> None:
    if saved == own:
        return
    for key in ("rank", "alpha", "targets", "base"):
        theirs, ours = (None if of is None else of[key] for of in (saved, own))
        if theirs != ours:
            what = "a base model with digest" if key == "base" else f"lora.{key}"
            raise ValueError(f"{folder}: it was saved with {what} {theirs}, this model has {ours}; expected the same")


def _weights(chunk: nn.Module) -> dict[str, Any]:
    return without_extra_state(unwrap(chunk).sharded_state_dict())


def _state(model: Model, optimizer: Optimizer | None, *, is_loading: bool) -> dict[str, Any]:
    """The state to write, or to read into.  Chunk numbers only separate names: files use whole-model layer numbers."""
    adapters = lora.identity(model)
    of_chunk = lora.sharded_state if adapters else _weights
    weights = {str(i): of_chunk(chunk) for i, chunk in enumerate(model)}
    state: dict[str, Any] = {"model": weights, "adapters": adapters}
    if optimizer is None:
        return state
    state |= {"step_index": optimizer.step_index, "kind": optimizer.kind}
    if optimizer.step_index == 0:  # no moments yet: e.g. an actor while only the critic warms up
        return state
    # The default sharding of the distributed optimizer does not load in 0.16.1; this one also changes layouts.
    how = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
    }
    moments = optimizer.inner.sharded_state_dict(weights, is_loading=is_loading, metadata=how)
    return {**state, "optimizer": moments}
