"""Ranks that share experts have unequal numbers of tokens for them, which gloo does not exchange by itself."""

from __future__ import annotations

import pytest
import torch
from spawn import Ranks
from unequal_cases import SIZES, WHOLE, exchanges

pytestmark = pytest.mark.dist


def test_unequal_rows_are_gathered_and_scattered(two_ranks: Ranks) -> None:
    ranks = two_ranks.run(exchanges)
    for rank, found in enumerate(ranks):
        assert torch.equal(found["gathered"], WHOLE)
        assert torch.equal(found["scattered"], 3 * WHOLE.split(SIZES)[rank])
        assert torch.equal(found["equal"], WHOLE[[0, 3]])


def test_stock_megatron_still_cannot_on_gloo(two_ranks: Ranks) -> None:
    """Where this fails because gloo does it now, remove what cpu.py does about it."""
    for found in two_ranks.run(exchanges):
        assert "invalid tensor size" in found["stock"]
