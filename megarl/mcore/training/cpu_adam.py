"""Megarl's part in Megatron's HybridDeviceOptimizer, which keeps moments on the host and updates weights there.

`optim.override_optimizer_config={optimizer_cpu_offload:true,optimizer_offload_fraction:1.0}`.  Each parameter that it
trains has a copy on the host with the moments; a step brings the gradient there and the new values back.  It needs
streams of a GPU: tests/gpu runs it, in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from megarl.arch.megatron_fields import CPU_OFFLOAD


def check_cpu_adam(fields: Mapping[str, Any], *, name: str, is_wrapped: bool) -> None:
    """Raises ValueError for an optimizer on the host that cannot be made.  `is_wrapped`: by Megatron's DDP."""
    if not fields.get(CPU_OFFLOAD):
        return
    if not torch.cuda.is_available():
        raise ValueError(
            f"{CPU_OFFLOAD}=true: Megatron's HybridDeviceOptimizer needs a GPU's streams, and there is no GPU"
        )
    if name != "adamw" or not is_wrapped:
        raise ValueError(f"{CPU_OFFLOAD}=true: expected optim.name=adamw and strategy=megatron")


def match_trained(part: Any) -> None:
    """Make it train what its part of Megatron's optimizer steps.

    Without the distributed optimizer, which does the same for its shards, Megatron puts float32 copies of bfloat16
    parameters into its groups after it was made (optimizer.py:680), and its first step does not know them.
    """
    inner = part.optimizer
    trained = {param for group in inner.param_groups for param in group["params"]}
    if trained != inner.param_to_inner_param.keys():
        part.optimizer = HybridDeviceOptimizer(inner.param_groups, **inner.defaults)


def host_copies(part: Any) -> dict[Tensor, Tensor]:
    """The parameters that a part of Megatron's optimizer trains on the host -> their copies there."""
    inner = part.optimizer  # None: the rank has nothing to train
    return dict(inner.gpu_params_map_cpu_copy) if isinstance(inner, HybridDeviceOptimizer) else {}


def refresh_copies(parts: list[Any]) -> None:
    """Copy the parameters to the host, after a checkpoint or a model's folder was read into them."""
    for part in parts:
        for param, copy in host_copies(part).items():
            copy.data.copy_(param.detach())


def make_host_state(inner: HybridDeviceOptimizer, step: int) -> None:
    """Zero moments of all copies, as after `step` steps; Megatron's own way makes a step with random gradients."""
    for optimizer in inner.cpu_optimizers:
        for copy in (copy for group in optimizer.param_groups for copy in group["params"]):
            zeros = {name: torch.zeros_like(copy) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[copy] = {"step": torch.tensor(float(step)), **zeros}
    inner._sync_sub_optimizers_state_to_hdo()
