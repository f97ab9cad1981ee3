"""Columns over a vocabulary that lies on two ranks: those of one rank, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from logprobs_cases import number_of_all_reduces, parts
from spawn import Ranks

pytestmark = pytest.mark.dist
G = torch.Generator().manual_seed(5)
SIDES = [2 * torch.randn(30, 3, generator=G), torch.randn(16, 3, generator=G)]
REFERENCE = [2 * torch.randn(30, 5, generator=G), torch.randn(16, 5, generator=G)]
FACTORS = torch.randn(4, 30, generator=G)
# No padding; padding on the second rank; a second rank that holds padding only.
VOCAB_SIZES = [16, 11, 6]
# Labels that all three have, and for two tokens the last row of each.
LABELS = torch.randint(0, 6, (30,), generator=G)
LAST = {size: torch.where(torch.arange(30) < 2, size - 1, LABELS) for size in VOCAB_SIZES}


@pytest.fixture(scope="module", params=[False, True], ids=["tp2", "tp2+sp"])
def by_rank(request: pytest.FixtureRequest, two_ranks: Ranks) -> tuple[bool, list[dict[int, list[torch.Tensor]]]]:
    return request.param, two_ranks.run(parts, SIDES, REFERENCE, LAST, FACTORS, request.param)


def reference(vocab_size: int) -> list[torch.Tensor]:
    own = [side.double().requires_grad_() for side in SIDES]

    def log_softmax(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (hidden @ weight[:vocab_size].T / 0.8).log_softmax(-1)

    log_p, log_q = log_softmax(*own), log_softmax(*(side.double() for side in REFERENCE))
    p = log_p.exp()
    columns = [log_p.gather(1, LAST[vocab_size][:, None])[:, 0], -(p * log_p).sum(-1)]
    columns += [p.square().sum(-1), (p * (log_p - log_q)).sum(-1)]
    stacked = torch.stack(columns)
    return [stacked.detach(), *torch.autograd.grad((stacked * FACTORS).sum(), own)]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_two_ranks_give_the_columns_and_the_gradients_of_one(by_rank: Any, vocab_size: int) -> None:
    columns, of_hidden, of_weight = reference(vocab_size)
    is_split, ranks = by_rank
    first, second = (rank[vocab_size] for rank in ranks)
    assert torch.equal(first[0], second[0]), "both ranks evaluate the same loss"
    torch.testing.assert_close(first[0].double(), columns, atol=1e-5, rtol=0)
    if is_split:
        whole_hidden = torch.cat([first[1], second[1]])
    else:
        whole_hidden = first[1]
        assert torch.equal(first[1], second[1]), "each has what all parts of the vocabulary say"
    torch.testing.assert_close(whole_hidden.double(), of_hidden, atol=1e-5, rtol=1e-5)
    whole = torch.cat([first[2], second[2]]).double()
    torch.testing.assert_close(whole, of_weight, atol=2e-5, rtol=1e-5)
    assert not whole[vocab_size:].any()


@pytest.mark.parametrize("num_tokens", [1, 50])
def test_a_row_costs_two_all_reduces_forwards_and_one_backwards(two_ranks: Ranks, num_tokens: int) -> None:
    assert two_ranks.run(number_of_all_reduces, num_tokens) == [(2, 1)] * 2
