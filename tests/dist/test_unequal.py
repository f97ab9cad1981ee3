"""Ranks that share experts have unequal numbers of tokens for them, which gloo does not exchange by itself."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from spawn import Ranks

pytestmark = pytest.mark.dist

SIZES = [3, 1]
WHOLE = torch.arange(8.0).view(4, 2)


def exchanges() -> tuple[list[torch.Tensor], str]:
    """Gathered rows, of unequal and of equal sizes, the sum of what both ranks scatter; what the stock gather says."""
    rank, group = dist.get_rank(), dist.group.WORLD
    own = WHOLE.split(SIZES)[rank]
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    found = [gather(own, group, SIZES), gather(own[:1], group, [1, 1]), scatter(WHOLE * (rank + 1), group, SIZES)]
    try:
        gather.__wrapped__(own, group, SIZES)
    except (RuntimeError, ValueError) as error:
        return found, str(error)
    return found, ""


def test_unequal_rows_are_gathered_and_scattered_and_stock_megatron_still_cannot(two_ranks: Ranks) -> None:
    """Where it can because gloo does it now, remove what cpu.py does about it."""
    for rank, ((gathered, equal, scattered), stock) in enumerate(two_ranks.run(exchanges)):
        assert torch.equal(gathered, WHOLE)
        assert torch.equal(equal, WHOLE[[0, 3]])
        assert torch.equal(scattered, 3 * WHOLE.split(SIZES)[rank])
        assert "invalid tensor size" in stock
