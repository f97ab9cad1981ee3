"""Parameters of a rank, counted in Megatron's own modules on the meta device, in a fake world of ranks.

Weights on the meta device have a shape and no memory, and process groups of torch's "fake" backend have ranks without
processes, so that one process can take any rank in a world of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import lcm
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.arch.hf_config import completed
from megarl.arch.layout import Layout
from megarl.arch.settings.hf import HFConfig
from megarl.mcore import cpu
from megarl.mcore.models.model import make_chunks
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.weights.count import Parameters


class _NoDevice(TorchFunctionMode):
    """Create tensors on torch's default device and ignore a requested device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "device"})


def built(hf: HFConfig, layout: Layout, stage: int, role: str = "actor") -> Parameters:
    """The parameters that Megatron creates on a rank of pipeline stage `stage`.  No process group may exist yet."""
    with fake_world(layout, stage), torch.device("meta"), _NoDevice(), _unfilled():
        chunks = make_chunks(completed(hf), layout, role=role, dtype="bfloat16")
    named = [(name, parameter) for chunk in chunks for name, parameter in chunk.named_parameters()]
    experts = sum(parameter.numel() for name, parameter in named if ".experts." in name)
    return Parameters(sum(parameter.numel() for _, parameter in named) - experts, experts)


@contextmanager
def _unfilled() -> Iterator[None]:
    """Skip the initialisation of weights, and the all-reduce that copies tied embeddings from the first stage."""

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    places = (layers, "_initialize_affine_weight_cpu"), (layers, "_initialize_affine_weight_gpu"), (dist, "all_reduce")
    with ExitStack() as stack:
        for place, name in places:
            stack.enter_context(mock.patch.object(place, name, nothing))
        yield


@contextmanager
def fake_world(layout: Layout, stage: int) -> Iterator[None]:
    """Make this process the first rank of a stage, in the smallest world that holds the layout."""
    cpu.activate()
    stage_ranks = lcm(layout.tp * layout.cp, layout.ep * layout.expert_tp)
    dist.init_process_group("fake", store=FakeStore(), rank=stage * stage_ranks, world_size=layout.pp * stage_ranks)
    try:
        make_groups(layout)
        assert parallel_state.get_pipeline_model_parallel_rank() == stage, "pipeline stages lie one after the other"
        yield
    finally:
        destroy_groups()
        dist.destroy_process_group()
