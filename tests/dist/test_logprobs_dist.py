"""Log-probabilities over a vocabulary that lies on two ranks: those of one rank, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from logprobs_cases import parts
from spawn import Ranks

pytestmark = pytest.mark.dist
G = torch.Generator().manual_seed(5)
LOGITS, FACTORS = 4 * torch.randn(30, 16, generator=G), torch.randn(2, 30, generator=G)
# No padding; padding on the second rank; a second rank that holds padding only.
VOCAB_SIZES = [16, 11, 6]
# Labels that all three have, and for two tokens the last row of each.
LABELS = torch.randint(0, 6, (30,), generator=G)
LAST = {size: torch.where(torch.arange(30) < 2, size - 1, LABELS) for size in VOCAB_SIZES}


@pytest.fixture(scope="module")
def by_rank(two_ranks: Ranks) -> list[dict[int, list[torch.Tensor]]]:
    return two_ranks.run(parts, LOGITS, LAST, FACTORS)


def reference(vocab_size: int) -> list[torch.Tensor]:
    logits = LOGITS.double().requires_grad_()
    log_p = (logits[:, :vocab_size] / 0.8).log_softmax(-1)
    columns = [log_p.gather(1, LAST[vocab_size][:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)]
    total = sum((column * factor).sum() for column, factor in zip(columns, FACTORS, strict=True))
    return [*(column.detach() for column in columns), *torch.autograd.grad(total, logits)]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_two_ranks_give_the_columns_and_the_gradient_of_one(by_rank: list[Any], vocab_size: int) -> None:
    log_probs, entropy, gradient = reference(vocab_size)
    first, second = (rank[vocab_size] for rank in by_rank)
    for rank in (first, second):
        torch.testing.assert_close(rank[0].double(), log_probs, atol=3e-6, rtol=0)
        torch.testing.assert_close(rank[1].double(), entropy, atol=3e-6, rtol=0)
    assert torch.equal(first[0], second[0]), "both ranks evaluate the same loss"
    whole = torch.cat([first[2], second[2]], dim=-1).double()
    torch.testing.assert_close(whole, gradient, atol=3e-6, rtol=1e-5)
    assert not whole[:, vocab_size:].any()
