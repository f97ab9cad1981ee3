"""Save and load a model and its optimizer; every layout loads what any other has saved.

For a model with adapters only the adapters are written, with a digest of the base model.  The base never changes and
is loaded from its HF folder.  With strategy=fsdp weights are written like all others, and the optimizer's shards as
they are, for the same number of ranks.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megarl.mcore.checkpoint.files import Reader, Saving, about_of, write
from megarl.mcore.checkpoint.held import held_optimizer, held_weights
from megarl.mcore.models.lora import settings_of
from megarl.mcore.models.low_rank import number_of
from megarl.mcore.models.model import Model, unwrap, whole_name
from megarl.mcore.training.optimizer import Optimizer
from megarl.mcore.training.wrappers import FsdpOptimizer


def save(folder: Path, model: Model, optimizer: Optimizer | None, *, in_background: bool = False) -> Saving:
    """Write this rank's share; every rank of the group calls it.  `folder` must not hold a checkpoint yet.

    Returns when all ranks have written theirs.  `in_background`: returns when this rank's share is in host memory; then
    the checkpoint is finished when the savings of all ranks are.  A rank that cannot write says so in its Saving.
    `checkpoint.json` is {"ranks", "adapters", "step_index", "kind"}.
    """
    about: dict[str, Any] = {"ranks": dist.get_world_size(), "adapters": adapter_identity(model), "step_index": 0}
    pieces = [*held_weights(model, own=True)]
    if optimizer is not None:
        about |= {"step_index": optimizer.step_index, "kind": optimizer.kind}
        if optimizer.step_index:  # else there are no moments yet: e.g. of an actor while only the critic warms up
            pieces += held_optimizer(optimizer, model, own=True)
    rank = dist.get_rank()
    saving = write(folder, rank, pieces, in_background=in_background, about=about if rank == 0 else None)
    if not in_background:
        dist.barrier()
    return saving


def load(folder: Path, model: Model, optimizer: Optimizer | None) -> None:
    """Fill the model and a new optimizer from a checkpoint, whatever layout wrote it; every rank reads its own part.

    Raises a ValueError if the folder holds no finished checkpoint, or one of another kind of optimizer, or of adapters
    that differ from the model's or belong to another base model, or MTP layers that the model has not.
    """
    about = about_of(folder)
    _check_adapters(folder, about["adapters"], adapter_identity(model))
    if optimizer is not None:
        optimizer.step_index = _saved_step(folder, about, optimizer.kind)
    reader = Reader(folder, about["ranks"])
    if not unwrap(model[0]).config.mtp_num_layers and any(name.startswith("mtp.") for name in reader.sizes):
        raise ValueError(f"{folder}: it has trained MTP layers, which mtp=off would lose; expected detached or joint")
    reader.fill(held_weights(model, own=False))
    if optimizer is None:
        return
    if not optimizer.step_index:
        optimizer.inner.reload_model_params()  # the float32 master weights of bf16 weights
        optimizer.weights_were_read()
        return
    optimizer.make_state()
    if isinstance(optimizer.inner, FsdpOptimizer):
        optimizer.inner.copy_weights()
    reader.fill(held_optimizer(optimizer, model, own=False))
    optimizer.weights_were_read()


def adapters_in(folder: Path) -> dict[str, Any] | None:
    """The description of a checkpoint's adapters (`adapter_identity`); None: it holds a whole model."""
    found: dict[str, Any] | None = about_of(folder)["adapters"]
    return found


def weights_in(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor of the model in a checkpoint, by Megatron's name."""
    sizes = Reader(folder, about_of(folder)["ranks"]).sizes
    return {name: size for name, size in sizes.items() if not name.startswith(("optimizer.", "fsdp."))}


def _saved_step(folder: Path, about: dict[str, Any], kind: str) -> int:
    if about["step_index"] and about["kind"] != kind:
        raise ValueError(
            f"{folder}: its optimizer had {about['kind']}, this one has {kind}; expected the same settings"
        )
    return int(about["step_index"])


def _check_adapters(folder: Path, saved: dict[str, Any] | None, own: dict[str, Any] | None) -> None:
    if saved == own:
        return
    for key in ("rank", "alpha", "targets", "base"):
        theirs, ours = (None if of is None else of[key] for of in (saved, own))
        if theirs != ours:
            what = "a base model with digest" if key == "base" else f"lora.{key}"
            raise ValueError(f"{folder}: it was saved with {what} {theirs}, this model has {ours}; expected the same")


def adapter_identity(model: Model) -> dict[str, Any] | None:
    """Settings of the adapters and a digest of the base model; the same under every layout.  A collective."""
    settings = settings_of(model)
    return (
        None if settings is None else {**asdict(settings), "targets": [*settings.targets], "base": _base_digest(model)}
    )


def _base_digest(model: Model) -> int:
    """Digest of the frozen parameters: the sum of their bits as integers, with a factor for each parameter name.

    A sum does not depend on how a parameter is cut; padding is zero and adds nothing.
    """
    device = next(model[0].parameters()).device
    groups = ps.get_model_parallel_group(), ps.get_expert_tensor_model_pipeline_parallel_group()
    total = 0
    for group, of_experts in zip(groups, (False, True), strict=True):
        own = sum(_digest_of(unwrap(chunk), of_experts) for chunk in model)
        summed = torch.tensor([own % 2**40], device=device)
        dist.all_reduce(summed, group=group)
        total += int(summed)
    return total % 2**40


def _digest_of(gpt: Any, of_experts: bool) -> int:
    """Of a chunk's experts that are distributed over ranks, or of everything else."""
    total = 0
    for name, param in gpt.named_parameters():
        counts = param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param)
        if param.requires_grad or not counts or getattr(param, "allreduce", True) is of_experts:
            continue
        bits = param.detach().view(torch.int32 if param.dtype is torch.float32 else torch.int16)
        total += int(bits.sum(dtype=torch.int64)) * number_of(whole_name(gpt, name))
    return total
