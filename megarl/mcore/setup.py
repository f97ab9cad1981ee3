"""Sets up one rank: process groups, seeds and device."""

from __future__ import annotations

import datetime
import gc
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megarl.arch.layout import Layout
from megarl.mcore import fixes


@dataclass(frozen=True)
class RankInfo:
    """The position of this rank.  A replica's reporter is the rank that answers for the replica."""

    rank: int
    replica: int  # index over data parallelism
    num_replicas: int
    is_reporter: bool  # last pipeline stage, first of its tensor and context groups
    is_first: bool  # the lowest rank of the replica, which receives the tensors of a call


def device_for(name: str) -> torch.device:
    """auto | cpu | cuda -> the device of this rank; a group's ranks use consecutive GPUs of a machine."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("trainer.device=cuda: torch sees no CUDA device; expected trainer.device=cpu or a CUDA build")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    first, own = (int(os.environ.get(key, "0")) for key in ("MEGARL_FIRST_GPU", "LOCAL_RANK"))
    return torch.device("cuda", first + own)


def backend_of(device: str) -> str:
    """cpu | cuda -> what a world speaks whose tensors are there.

    On GPUs this is NCCL alone: with gloo beside it, every group would open a socket for every pair of its ranks.
    Tensors in host memory need a group of their own, such as `replica_group`.
    """
    return "nccl" if device == "cuda" else "gloo"


def make_groups(layout: Layout, *, seed: int = 0, timeout_s: float = 600.0) -> RankInfo:
    """Megatron's groups of one layout in an initialised world; can be called again after `destroy_groups`.

    Without Megatron's further groups for tensors in host memory: only its own checkpoints of optimizers need them.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    fixes.apply()
    layout.data_parallel_size(dist.get_world_size())
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        distributed_timeout_minutes=max(1, int(timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    # Dropout is 0 in RL, so no CUDA generator is needed: with this tracker, forks are no-ops.
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)
    torch.manual_seed(seed)
    return rank_info()


def rank_info() -> RankInfo:
    from megatron.core import parallel_state as ps

    first = ps.get_tensor_model_parallel_rank() == 0 and ps.get_context_parallel_rank() == 0
    return RankInfo(
        rank=dist.get_rank(),
        replica=ps.get_data_parallel_rank(),
        num_replicas=ps.get_data_parallel_world_size(),
        is_reporter=first and ps.is_pipeline_last_stage(),
        is_first=first and ps.is_pipeline_first_stage(),
    )


def in_first_copy() -> bool:
    """Whether this rank belongs to the first copy of the model: rank 0 and the ranks that gather with it.

    Ranks of a pipeline stage are numbered by tensor-parallel rank first; for experts by expert-tensor-parallel rank,
    then expert-parallel rank.  So the ranks of a copy are consecutive within a stage.
    """
    from megatron.core import parallel_state as ps

    stages = ps.get_pipeline_model_parallel_world_size()
    return dist.get_rank() % (dist.get_world_size() // stages) < ranks_of_copy() // stages


def ranks_of_copy() -> int:
    """Number of ranks over which one copy of the model is gathered."""
    from megatron.core import parallel_state as ps

    experts = ps.get_expert_tensor_parallel_world_size() * ps.get_expert_model_parallel_world_size()
    of_stage = math.lcm(ps.get_tensor_model_parallel_world_size(), experts)
    return of_stage * ps.get_pipeline_model_parallel_world_size()


def replica_group(*, timeout_s: float = 600.0) -> Any:
    """A gloo group of this rank's data-parallel replica (its tp, cp and pp ranks), for tensors on the CPU.

    Collective over all ranks.  Never make one gloo group of all ranks: it opens a socket for every pair of ranks.
    """
    where, world = rank_info(), dist.get_world_size()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    replicas = torch.empty(world, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(replicas, torch.tensor([where.replica], device=device))
    mine = None
    for replica in range(where.num_replicas):
        ranks = [rank for rank, its in enumerate(replicas.tolist()) if its == replica]
        group = dist.new_group(ranks, backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        mine = group if where.rank in ranks else mine
    return mine


def destroy_groups() -> None:
    """Destroy every group except the world; Megatron only drops its references, and three gloo threads stay for each.

    The gradient buffers of a model form reference cycles with groups, which only the garbage collector frees.  It sees
    no cycle through the graph of a backward pass, which modules keep: dispatchers of experts have their probabilities.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    for kept in gc.get_objects():
        if type(kept) is torch.Tensor and kept.grad_fn is not None and not kept._is_view():
            kept.detach_()
    gc.collect()
