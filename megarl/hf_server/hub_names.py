"""The names that folders of the hub have for the tensors of transformers' models."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor


class ExpertNames(NamedTuple):
    """Names in hub folders: the module with the experts, and gate, up and down of one expert."""

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_MIXTRAL = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
EXPERT_NAMES = {"mixtral": _MIXTRAL, "minimax_m2": _MIXTRAL}  # others have the names of Qwen3-MoE
STACKED_OUTSIDE = ("gpt_oss",)  # families whose folders have the same stacks as transformers
WITH_BACKBONE = ("nemotron_h",)  # families whose folders name the body so, and not model


def hub_tensors(model: torch.nn.Module, model_type: str) -> dict[str, Tensor]:
    """Every parameter and every saved buffer by its hub name; tied ones under each of their names.

    Transformers keeps all experts of a layer in two stacked parameters; in the hub folders of most families each expert
    has its own matrices.  Here each such matrix is a view of the stack, so that a copy into it changes the model.
    """
    names = EXPERT_NAMES.get(model_type, ExpertNames())
    ends = ("experts.gate_up_proj", "experts.up_proj")
    stacked = {name.rpartition(".")[0] for name, _ in model.named_parameters() if name.endswith(ends)}
    if model_type in STACKED_OUTSIDE:
        stacked = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        module, _, kind = name.rpartition(".")
        hub_module = re.sub(r"\.mlp(?=\.|$)", f".{names.module}", module) if _is_sparse(module, stacked) else module
        if module not in stacked:
            tensors[f"{hub_module}.{kind}"] = tensor
            continue
        for number, expert in enumerate(tensor):
            prefix = f"{hub_module}.{number}"
            parts = expert.chunk(2) if kind == "gate_up_proj" else (expert,)
            keys = {"gate_up_proj": (names.gate, names.up), "up_proj": (names.up,)}.get(kind, (names.down,))
            tensors |= {f"{prefix}.{key}.weight": part for key, part in zip(keys, parts, strict=True)}
    outside = "backbone." if model_type in WITH_BACKBONE else "model."
    return {re.sub(r"^model\.", outside, name): tensor for name, tensor in tensors.items()}


def _is_sparse(module: str, stacked: set[str]) -> bool:
    """Whether a module is an MoE layer, or its router, or its experts."""
    layer = module.rpartition(".")[0]
    return f"{layer}.experts" in stacked or f"{module}.experts" in stacked
