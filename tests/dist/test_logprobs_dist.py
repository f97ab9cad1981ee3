"""Columns and divergences over a vocabulary that lies on two ranks: those of one rank, gradients included."""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from divergence_plain import plain_divergence
from logprobs_plain import plain_columns
from spawn import Ranks
from torch import Tensor

from megarl.algo.divergences import make_divergence
from megarl.arch.layout import Layout
from megarl.mcore.logprobs import fused
from megarl.mcore.logprobs.divergence import TeacherStates, divergence_of_chunks
from megarl.mcore.logprobs.fused import Job, columns_of_chunks
from megarl.mcore.setup import destroy_groups, make_groups

pytestmark = pytest.mark.dist

NAMES = ("log_probs", "entropy", "sum_pi_squared", "full_kl")
COLUMNS = "columns"  # in the place of a divergence: the columns with these names
Key = tuple[str, int]  # a divergence, and the size of the vocabulary


@dataclass(frozen=True)
class Whole:
    """What is not split: of the policy, of the reference (hidden states [T, H] and weight [V, H]), of two teachers."""

    sides: list[Tensor]
    reference: list[Tensor]
    teacher: Tensor
    states: Tensor
    heads: list[Tensor]
    labels: dict[int, Tensor]  # of each size of the vocabulary
    factors: Tensor  # of each column, in the sum whose gradient is looked at


def parts(whole: Whole, keys: list[Key], sequence_parallel: bool) -> dict[Key, list[Tensor]]:
    """Of each key: the columns [n, T], and the gradients of the hidden states (of this rank's tokens under sequence
    parallelism) and of this rank's half of the weight."""
    rank = make_groups(Layout(tp=2, sequence_parallel=sequence_parallel)).rank
    found = {}
    try:
        for key in keys:
            name, vocab_size = key
            hidden, weight = (side.chunk(2)[rank].clone() for side in whole.sides)
            ref_hidden, ref_weight = (side.chunk(2)[rank] for side in whole.reference)
            if not sequence_parallel:
                hidden, ref_hidden = whole.sides[0].clone(), whole.reference[0]
            own = [hidden.requires_grad_(), weight.requires_grad_()]
            job = Job(NAMES if name == COLUMNS else (), vocab_size, 0.8, sequence_parallel)
            with mock.patch.multiple(fused, CHUNK_ELEMENTS=64, CHUNK_TOKENS=7):
                if name == COLUMNS:
                    columns = columns_of_chunks(job, *own, whole.labels[vocab_size], ref_hidden, ref_weight)
                    stacked = torch.stack([columns[name] for name in NAMES])
                else:
                    theirs = TeacherStates(whole.teacher, whole.states, [head.chunk(2)[rank] for head in whole.heads])
                    stacked = divergence_of_chunks(job, make_divergence(name, 0.3), *own, theirs)[None]
                gradients = torch.autograd.grad((stacked * whole.factors[: len(stacked)]).sum(), own)
            found[key] = [stacked.detach(), *gradients]
    finally:
        destroy_groups()
    return found


def number_of_all_reduces(num_tokens: int) -> tuple[int, int]:
    """Forwards and backwards, for a row of many chunks."""
    make_groups(Layout(tp=2))
    try:
        hidden, weight = torch.randn(num_tokens, 3, requires_grad=True), torch.randn(24, 3)
        labels = torch.zeros(num_tokens, dtype=torch.int64)
        stock = torch.distributed.all_reduce
        with (
            mock.patch.multiple(fused, CHUNK_ELEMENTS=64, CHUNK_TOKENS=4),
            mock.patch("torch.distributed.all_reduce", side_effect=stock) as calls,
        ):
            column = columns_of_chunks(Job(("log_probs", "entropy"), 40), hidden, weight, labels)["entropy"]
            forwards = calls.call_count
            column.sum().backward()
            return forwards, calls.call_count - forwards
    finally:
        destroy_groups()


G = torch.Generator().manual_seed(5)
# No padding; padding on the second rank; a second rank that holds padding only.
KEYS: list[Key] = [(name, size) for name in (COLUMNS, "reverse_kl", "forward_kl", "jsd") for size in (16, 11, 6)]
# Labels that all sizes have, and for two tokens the last row of each.
LABELS = torch.randint(0, 6, (30,), generator=G)
WHOLE = Whole(
    sides=[2 * torch.randn(30, 3, generator=G), torch.randn(16, 3, generator=G)],
    reference=[2 * torch.randn(30, 5, generator=G), torch.randn(16, 5, generator=G)],
    teacher=torch.randint(0, 3, (30,), generator=G),
    states=torch.randn(30, 5, generator=G),
    heads=[torch.randn(16, width, generator=G) for width in (5, 2)],
    labels={size: torch.where(torch.arange(30) < 2, size - 1, LABELS) for size in (16, 11, 6)},
    factors=torch.randn(4, 30, generator=G),
)

Found = tuple[bool, list[dict[Key, list[torch.Tensor]]]]


@pytest.fixture(scope="module", params=[False, True], ids=["tp2", "tp2+sp"])
def by_rank(request: pytest.FixtureRequest, two_ranks: Ranks) -> Found:
    return request.param, two_ranks.run(parts, WHOLE, KEYS, request.param)


def reference(key: Key) -> list[torch.Tensor]:
    """The columns, and the gradients of the hidden states and of the weight, in float64."""
    own, (name, vocab_size) = [side.double().requires_grad_() for side in WHOLE.sides], key
    if name == COLUMNS:
        theirs = [side.double() for side in WHOLE.reference]
        columns = plain_columns(*own, WHOLE.labels[vocab_size], vocab_size, 0.8, theirs)
        stacked = torch.stack(list(columns.values()))
    else:
        whole = (WHOLE.teacher, WHOLE.states, WHOLE.heads)
        stacked = plain_divergence(name, 0.3, *own, *whole, vocab_size, 0.8)[None]
    factors = WHOLE.factors[: len(stacked)]
    return [stacked.detach(), *torch.autograd.grad((stacked * factors).sum(), own)]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_two_ranks_give_the_columns_and_the_gradients_of_one(by_rank: Found, key: Key) -> None:
    columns, of_hidden, of_weight = reference(key)
    is_split, ranks = by_rank
    first, second = (rank[key] for rank in ranks)
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
    assert not whole[key[1] :].any()
    assert of_weight.abs().max() > 1e-2


@pytest.mark.parametrize("num_tokens", [1, 50])
def test_a_row_costs_two_all_reduces_forwards_and_one_backwards(two_ranks: Ranks, num_tokens: int) -> None:
    assert two_ranks.run(number_of_all_reduces, num_tokens) == [(2, 1)] * 2
