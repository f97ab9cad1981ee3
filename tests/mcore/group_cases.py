"""Megatron's groups of a layout on one rank of many, without the others; runs on a rank of its own."""

from collections.abc import Sequence

import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.arch.layout import Layout
from megarl.mcore.setup import destroy_groups, make_groups

SIZES = {
    "tp": ps.get_tensor_model_parallel_world_size,
    "pp": ps.get_pipeline_model_parallel_world_size,
    "cp": ps.get_context_parallel_world_size,
    "dp": ps.get_data_parallel_world_size,
    "ep": ps.get_expert_model_parallel_world_size,
    "etp": ps.get_expert_tensor_parallel_world_size,
    "expert dp": ps.get_expert_data_parallel_world_size,
}


def sizes_of_groups(cases: Sequence[tuple[Layout, int, int]]) -> list[dict[str, int]]:
    """(layout, number of ranks, the rank that this one stands for) -> how many ranks each of its groups has."""
    dist.destroy_process_group()
    found = []
    for layout, num_ranks, rank in cases:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
        make_groups(layout)
        found.append({name: size() for name, size in SIZES.items()})
        destroy_groups()
        dist.destroy_process_group()
    return found
