"""The divergence from teachers over a vocabulary that lies on two ranks: that of one rank, gradients included."""

from __future__ import annotations

import pytest
import torch
from divergence_cases import Key, parts
from divergence_plain import plain_divergence
from spawn import Ranks

pytestmark = pytest.mark.dist
G = torch.Generator().manual_seed(5)
SIDES = [torch.randn(30, 3, generator=G), torch.randn(16, 3, generator=G)]
HEADS = [torch.randn(16, width, generator=G) for width in (5, 2)]
STATES = torch.randn(30, 5, generator=G)
TEACHER = torch.randint(0, 3, (30,), generator=G)
FACTORS = torch.randn(30, generator=G) / 30
# No padding; padding on the second rank; a second rank that holds padding only.
KEYS: list[Key] = [(name, size) for name in ("reverse_kl", "forward_kl", "jsd") for size in (16, 11, 6)]

Found = tuple[bool, list[dict[Key, list[torch.Tensor]]]]


@pytest.fixture(scope="module", params=[False, True], ids=["tp2", "tp2+sp"])
def by_rank(request: pytest.FixtureRequest, two_ranks: Ranks) -> Found:
    return request.param, two_ranks.run(parts, KEYS, SIDES, TEACHER, STATES, HEADS, FACTORS, request.param)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_two_ranks_give_the_column_and_the_gradients_of_one(by_rank: Found, key: Key) -> None:
    own = [side.double().requires_grad_() for side in SIDES]
    name, vocab_size = key
    column = plain_divergence(name, 0.3, *own, TEACHER, STATES, HEADS, vocab_size, 0.8)
    of_hidden, of_weight = torch.autograd.grad((column * FACTORS).sum(), own)
    is_split, ranks = by_rank
    first, second = (rank[key] for rank in ranks)
    assert torch.equal(first[0], second[0]), "both ranks evaluate the same loss"
    torch.testing.assert_close(first[0].double(), column.detach(), atol=1e-5, rtol=1e-5)
    if is_split:
        whole_hidden = torch.cat([first[1], second[1]])
    else:
        whole_hidden = first[1]
        assert torch.equal(first[1], second[1]), "each has what all parts of the vocabulary say"
    assert (whole_hidden.double() - of_hidden).abs().max() <= 1e-6
    whole = torch.cat([first[2], second[2]]).double()
    assert (whole - of_weight).abs().max() <= 1e-6
    assert not whole[vocab_size:].any()
    assert of_weight.abs().max() > 1e-3
