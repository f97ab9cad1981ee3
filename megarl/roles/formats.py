"""Fills a role that is not trained from a folder of any format, and takes the digests of its tensors and a folder's."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore.checkpoint import checkpoint
from megarl.mcore.checkpoint.files import faults_of_share
from megarl.mcore.checkpoint.held import held_weights
from megarl.mcore.checkpoint.torch_dist import TorchDistReader
from megarl.mcore.models.lora import LoraSettings, apply_lora, merge
from megarl.roles.role import Role
from megarl.weights.hf.export import hf_sizes, hf_tensors
from megarl.weights.hf.gather import local_parameters
from megarl.weights.hf.load import load_hf
from megarl.weights.hf.named import open_for
from megarl.weights.mapping.families import ignorable
from megarl.weights.verify.digests import digest


def read_weights(role: Role, kind: str, folder: Path, base: Path) -> None:
    """Fill the model from a folder: of Hugging Face (hf), our shards (megatron), Megatron's own format (torch_dist).

    Adapters are loaded onto the weights of `base`, an HF folder, and merged.  Weights are zeroed first, so that none of
    the folder before stays, and because a checkpoint may have fewer rows of padding.  ValueError for a folder that is
    damaged or of another model.
    """
    for tensor in local_parameters(role.model).values():
        tensor.zero_()
    if kind == "torch_dist":
        TorchDistReader(folder).fill(held_weights(role.model, own=False))
    elif kind == "megatron":
        _read_shards(role, folder, base)
    else:
        load_hf(role.model, folder, role.hf, role=role.kind)


def _read_shards(role: Role, folder: Path, base: Path) -> None:
    if faults := faults_of_share(folder, dist.get_rank(), dist.get_world_size()):
        raise ValueError(f"{'; '.join(faults)}; expected an unchanged folder")
    adapters = checkpoint.adapters_in(folder)
    if adapters is not None:
        load_hf(role.model, base, role.hf, role=role.kind)
        apply_lora(role.model, LoraSettings(adapters["rank"], adapters["alpha"], tuple(adapters["targets"])))
    checkpoint.load(folder, role.model, None)
    if adapters is not None:
        merge(role.model)


def digests_of(role: Role) -> dict[str, str]:
    """HF name -> digest of each tensor that the ranks hold together; rank 0 has them, and all ranks call it."""
    found: dict[str, str] = {}
    for name, tensor in hf_tensors(role.model, role.hf, role=role.kind):
        if dist.get_rank() == 0:
            found[name] = _digest(tensor)
    return found


def digests_in(folder: Path, role: Role) -> dict[str, str]:
    """The same for an HF folder, cast to the model's types; includes tensors that are unknown to the model."""
    sizes = hf_sizes(role.model, role.hf, role=role.kind)
    if dist.get_rank() > 0:
        return {}
    with open_for(folder, role.hf) as source:
        names = [name for name in source.hub_shapes if name not in ignorable(role.hf, role.kind)]
        types = {name: sizes[name][1] if name in sizes else torch.float32 for name in names}
        return {name: _digest(source.read_hub(name).to(types[name])) for name in names}


def _digest(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {digest(tensor)}"
