"""One GPU, and Megatron's process groups on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megarl.layout import Layout
from megarl.mcore.setup import destroy_groups, make_groups


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """A world of one rank, without Megatron's groups."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one_gpu(world: None) -> Iterator[None]:  # noqa: ARG001
    """Groups of size 1."""
    make_groups(Layout())
    yield
    destroy_groups()
