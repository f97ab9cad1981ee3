"""What a checkpoint holds of a model with adapters: the adapters, their settings, and a digest of the base."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import nn

from megarl.mcore.models.lora import adapted, settings_of
from megarl.mcore.models.low_rank import number_of
from megarl.mcore.models.model import Model, unwrap, whole_name


def sharded_state(chunk: nn.Module) -> dict[str, Any]:
    """The adapters for a checkpoint: {name in this chunk: sharded tensor under the name in the whole model}."""
    names = {id(param): name for name, param in unwrap(chunk).named_parameters()}
    dense, expert = ps.get_data_parallel_group(with_context_parallel=True), ps.get_expert_data_parallel_group()
    state: dict[str, Any] = {}
    for path, linear in adapted([chunk]):
        groups = {"dp_cp_group": expert if linear.is_expert else dense, "tp_group": linear.tp_group}
        for projection, low_rank in linear.lora.projections.items():
            for factor, param in low_rank.named_parameters():
                key, axis = f"{path}.lora.{projection}.{factor}", low_rank.cut[factor]
                if axis is None:
                    state[names[id(param)]] = make_sharded_tensor_for_checkpoint(param, key, **groups)
                else:
                    state[names[id(param)]] = make_tp_sharded_tensor_for_checkpoint(param, key, tp_axis=axis, **groups)
    return state


def identity(model: Model) -> dict[str, Any] | None:
    """Settings of the adapters and a digest of the base model; the same under every layout.  A collective."""
    settings = settings_of(model)
    return None if settings is None else {**asdict(settings), "targets": [*settings.targets], "base": _digest(model)}


def _digest(model: Model) -> int:
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
