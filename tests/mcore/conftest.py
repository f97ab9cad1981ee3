"""A world of one rank in the test's own process: enough for everything that only asks who its neighbours are."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """Megatron's process groups, all of size 1, for each file of this folder."""
    from megarl.arch.layout import Layout
    from megarl.mcore.setup import destroy_groups, make_groups

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    make_groups(Layout())
    yield
    destroy_groups()
    dist.destroy_process_group()
