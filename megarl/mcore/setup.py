"""Process groups, seeds and devices of one rank."""

from __future__ import annotations

import datetime
import gc
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megarl.mcore import cpu, fixes


@dataclass(frozen=True)
class Layout:
    """How one model lies over the ranks of a group; data parallelism is what is left of the world.

    Dense layers lie over tp*cp*dp ranks of a pipeline stage.  The experts of the same layers lie over the same ranks in
    their own way: cut over `etp`, dealt to `ep`, and copied over what is left.  So expert parallelism takes its ranks
    from those of tensor, context and data parallelism: it adds none, and the data of a step is split as without it.
    """

    tp: int = 1  # tensor parallel
    pp: int = 1  # pipeline parallel
    cp: int = 1  # context parallel
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    ep: int = 1  # expert parallel
    etp: int | None = None  # tensor parallel inside an expert; None: as tp

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def model_size(self) -> int:
        """Ranks that one data-parallel replica takes; with experts over several replicas, these hold the model."""
        return self.tp * self.pp * self.cp

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas among which the sequences of a step are split.  ValueError where a size does not divide."""
        if world_size % self.model_size:
            raise ValueError(
                f"tp*pp*cp = {self.tp}*{self.pp}*{self.cp} = {self.model_size} does not divide {world_size} ranks"
            )
        expert_size = self.ep * self.expert_tp * self.pp
        if world_size % expert_size:
            raise ValueError(
                f"ep*etp*pp = {self.ep}*{self.expert_tp}*{self.pp} = {expert_size} does not divide {world_size} ranks"
            )
        return world_size // self.model_size


@dataclass(frozen=True)
class Place:
    """Where this rank stands.  A replica's reporter is the rank whose answer is the answer of the replica."""

    rank: int
    replica: int  # index over data parallelism
    num_replicas: int
    is_reporter: bool  # last pipeline stage, first of its tensor and context groups
    is_first: bool  # the lowest rank of the replica, which takes the tensors of a call


def device_for(name: str) -> torch.device:
    """auto | cpu | cuda -> the device of this rank."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("trainer.device=cuda: torch sees no CUDA device; want trainer.device=cpu or a CUDA build")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def initialize(layout: Layout, *, device: str = "auto", seed: int = 0, timeout_s: float = 600.0) -> Place:
    """Join the world that torchrun describes in the environment, and make Megatron's process groups.

    A collective that waits longer than `timeout_s` raises (gloo's own default is 30 silent minutes).
    """
    cpu.activate()
    where = device_for(device)
    backend = "gloo"
    if where.type == "cuda":
        torch.cuda.set_device(where)
        backend = "cpu:gloo,cuda:nccl"
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    return make_groups(layout, seed=seed, timeout_s=timeout_s)


def make_groups(layout: Layout, *, seed: int = 0, timeout_s: float = 600.0) -> Place:
    """Megatron's groups of one layout in an initialised world; can be called again after `destroy_groups`."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    fixes.apply()
    layout.data_parallel_size(dist.get_world_size())
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        distributed_timeout_minutes=max(1, int(timeout_s / 60)),
    )
    # Dropout is 0 in RL, so no CUDA generator is needed: the tracker's forks become no-ops.
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)
    torch.manual_seed(seed)
    return place()


def place() -> Place:
    from megatron.core import parallel_state as ps

    first = ps.get_tensor_model_parallel_rank() == 0 and ps.get_context_parallel_rank() == 0
    return Place(
        rank=dist.get_rank(),
        replica=ps.get_data_parallel_rank(),
        num_replicas=ps.get_data_parallel_world_size(),
        is_reporter=first and ps.is_pipeline_last_stage(),
        is_first=first and ps.is_pipeline_first_stage(),
    )


def replica_group(*, timeout_s: float = 600.0) -> Any:
    """A gloo group of this rank's data-parallel replica (its tp, cp and pp ranks), for tensors on the CPU.

    Collective over all ranks.  Never one gloo group over everyone: it opens a socket for every pair of ranks.
    """
    where, world = place(), dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend() else "cpu"
    replicas = torch.empty(world, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(replicas, torch.tensor([where.replica], device=device))
    mine = None
    for replica in range(where.num_replicas):
        ranks = [rank for rank, its in enumerate(replicas.tolist()) if its == replica]
        group = dist.new_group(ranks, backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        mine = group if where.rank in ranks else mine
    return mine


def destroy_groups() -> None:
    """Undo `make_groups`; Megatron itself only forgets its groups, and leaves three threads of gloo's for each.

    The gradient buffers of a model refer to groups in circles, which only the collector takes apart.
    """
    from megatron.core import parallel_state

    made = parallel_state._global_process_group_list or []
    parallel_state.destroy_model_parallel()
    for group in made:
        if group is not None and group in dist.distributed_c10d._world.pg_map:  # None stands for the world
            dist.destroy_process_group(group)
    del made
    gc.collect()
