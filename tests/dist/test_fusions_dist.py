"""Our models with Megatron's fused activation, on a rank of its own."""

from __future__ import annotations

import pytest
import torch
from fusion_cases import with_and_without
from spawn import run_ranks

pytestmark = pytest.mark.dist


def test_the_fused_activation_is_that_of_every_family() -> None:
    """Dense layers, experts and shared experts."""
    families = ["qwen3", "mixtral", "deepseek_v3"]
    (found,) = run_ranks(1, with_and_without, families, timeout_s=120)
    assert list(found) == families
    for plain, fused in found.values():
        assert len(plain) == len(fused) > 8
        for one, other in zip(plain, fused, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
