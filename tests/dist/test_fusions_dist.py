"""Our models with each activation, on a rank of its own."""

from __future__ import annotations

import pytest
import torch
from fusion_cases import in_three_ways
from spawn import run_ranks

pytestmark = pytest.mark.dist


def test_every_activation_is_the_same_in_every_family() -> None:
    """Dense layers, experts and shared experts; our gate is Megatron's operations to the bit."""
    families = ["qwen3", "mixtral", "deepseek_v3"]
    (found,) = run_ranks(1, in_three_ways, families, timeout_s=120)
    assert list(found) == families
    for ours, apart, fused in found.values():
        assert len(ours) == len(apart) == len(fused) > 8
        for one, other, third in zip(ours, apart, fused, strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(one, third, atol=1e-6, rtol=1e-5)
