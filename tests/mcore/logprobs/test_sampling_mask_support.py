"""Columns over the tokens that could be drawn, against softmaxes of whole logits with the others at minus infinity."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from logprobs_plain import ALL, Case, cases, chunks_of, gradients, masked_columns
from torch import Tensor

from megarl.arch.layout import Layout
from megarl.mcore.logprobs import fused
from megarl.mcore.logprobs.fused import Job, columns_of_chunks
from megarl.mcore.logprobs.support import Support
from megarl.mcore.training.packed_rows import make_row
from megarl.samples.batch import Batch, MicroBatch
from megarl.samples.ragged import COUNTS, Ragged
from megarl.samples.sample import SUPPORT


def supports(labels: Tensor, vocab_size: int, seed: int) -> list[list[int]]:
    """Of each label some ids, itself included; of every third none, which means all."""
    rng = np.random.default_rng(seed)
    found = []
    for place, label in enumerate(labels.tolist()):
        others = rng.permutation(vocab_size)[: rng.integers(0, vocab_size)].tolist()
        found.append([] if place % 3 == 2 else list(dict.fromkeys([label, *others])))
    return found


def as_support(lists: list[list[int]]) -> Support:
    counts = torch.tensor([len(ids) for ids in lists])
    ids = torch.tensor([token for ids in lists for token in ids], dtype=torch.int32)
    return Support(counts.cumsum(0) - counts, counts, ids)


def plain(
    sides: list[Tensor], labels: Tensor, lists: list[list[int]], vocab_size: int, temperature: float, reference: Any
) -> dict[str, Tensor]:
    excluded = torch.tensor([[bool(ids) and v not in ids for v in range(vocab_size)] for ids in lists])
    return masked_columns(*sides, labels, excluded, temperature, reference)


@given(cases(temperatures=(1.0, 0.01, 2.0)))
def test_values_and_gradients_are_those_of_a_masked_softmax(case: Case) -> None:
    g = case.generator
    scale = min(1.0, case.temperature)  # probabilities of some tokens at low temperatures too
    hidden, weight = case.sides(g)
    sides = [(2 * scale * hidden).requires_grad_(), weight.requires_grad_()]
    ref_hidden, ref_weight = case.sides(g, width=4)
    reference = [scale * ref_hidden, ref_weight]
    labels = torch.randint(0, case.vocab_size, (case.num_tokens,), generator=g)
    lists = supports(labels, case.vocab_size, case.seed)
    factors = torch.randn(4, case.num_tokens, generator=g).to(case.dtype)
    expected = plain(sides, labels, lists, case.vocab_size, case.temperature, reference)
    with chunks_of(*case.chunk):
        job = Job(ALL, case.vocab_size, case.temperature)
        got = columns_of_chunks(job, *sides, labels, *reference, support=as_support(lists))
        found = gradients(got, factors, *sides)
    for name in ALL:
        assert bool(got[name].isfinite().all())
        torch.testing.assert_close(got[name].double(), expected[name], atol=case.close, rtol=case.close)
    case.check_gradients(found, gradients(expected, factors, *sides), [*expected.values()])


def test_tokens_that_are_computed_together_have_few_ids() -> None:
    """3 ids for each place of 9 and at most 5 in a lot, but for those of its last place: 2 places."""
    lists = [[place, 10, 11] for place in range(9)]
    hidden, weight, labels = torch.randn(9, 3), torch.randn(16, 3), torch.arange(9)
    with chunks_of(5 * fused.IDS_SHARE, 9, 5 * fused.IDS_SHARE):
        job = Job(ALL[:3], 16)
        chunks = fused.Chunks(job, weight, None, as_support(lists))
        lots = [at.tolist() for at, _ in chunks.lots(hidden, None)]
        assert lots == [[0, 1], [2, 3], [4], [5, 6], [7, 8]]
        got = columns_of_chunks(job, hidden, weight, labels, support=as_support(lists))
    whole = columns_of_chunks(job, hidden, weight, labels, support=as_support(lists))
    for name in ALL[:3]:
        torch.testing.assert_close(got[name], whole[name])


def test_a_packed_row_has_the_support_of_what_each_place_predicts() -> None:
    """Two sequences of 3 and 2 tokens: place 0 predicts token 1, place 1 token 2, place 3 token 4."""
    lists = [[], [7], [8, 9], [], [5, 6, 7]]
    lengths = torch.tensor([3, 2])
    places, counts = Ragged.of(lists).spread(lengths.numpy())
    batch = Batch(torch.tensor([1, 7, 9, 2, 6]), lengths, {SUPPORT: places, SUPPORT + COUNTS: counts})
    row = make_row(MicroBatch(batch), Layout(), torch.device("cpu"))
    assert row.labels.tolist() == [7, 9, 0, 6, 0]
    assert row.support is not None
    found = [
        row.support.ids[start : start + count].tolist()
        for start, count in zip(row.support.starts.tolist(), row.support.counts.tolist(), strict=True)
    ]
    assert found == [[7], [8, 9], [], [5, 6, 7], []]
    assert make_row(MicroBatch(batch.keep_columns()), Layout(), torch.device("cpu")).support is None
    waiting = make_row(MicroBatch(batch), Layout(), torch.device("meta"))
    assert waiting.labels.is_meta
    for support, device in ((waiting.support, "cpu"), (waiting.support_there(), "meta")):
        assert {part.device.type for part in (support.starts, support.counts, support.ids)} == {device}
