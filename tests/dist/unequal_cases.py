"""What the ranks of test_unequal.py run: Megatron's exchanges of unequal numbers of rows, stock and mended."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings

SIZES = [3, 1]
WHOLE = torch.arange(8.0).view(4, 2)


def exchanges() -> dict[str, Any]:
    """Gathered rows, the sum of what both ranks scatter, and what gloo says to the stock gather."""
    rank, group = dist.get_rank(), dist.group.WORLD
    own = WHOLE.split(SIZES)[rank]
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    found: dict[str, Any] = {
        "gathered": gather(own, group, SIZES),
        "scattered": scatter(WHOLE * (rank + 1), group, SIZES),
        "equal": gather(own[:1], group, [1, 1]),
    }
    try:
        gather.__wrapped__(own, group, SIZES)
    except (RuntimeError, ValueError) as error:
        found["stock"] = str(error)
    return found
