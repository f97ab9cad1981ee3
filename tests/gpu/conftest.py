"""One GPU, and Megatron's process groups on it."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from step_cases import write_families

from megarl.arch.layout import Layout
from megarl.mcore.setup import destroy_groups, make_groups


@pytest.fixture(autouse=True, scope="package")
def exact_products() -> None:
    """Of float32: no TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Family -> folder of a model of it."""
    return write_families(tmp_path_factory.mktemp("families"))


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
