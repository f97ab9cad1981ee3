"""Vectorised drawing against a slow reference, row by row in plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.hf_server.sampling import draw, row_key, support, uniforms


def slow_draw(logits, temperature, top_p, top_k, uniform):
    """The definition: sort, keep the top k, of those the shortest prefix that reaches p, invert the distribution."""
    greedy = temperature == 0
    scaled = [z / (1.0 if greedy else temperature) for z in logits]
    peak = max(scaled)
    total = sum(math.exp(z - peak) for z in scaled)
    probs = [math.exp(z - peak) / total for z in scaled]
    if greedy:
        token = max(range(len(probs)), key=lambda i: (logits[i], -i))
        return token, math.log(probs[token])
    narrowed = top_p < 1 or top_k < len(probs)
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i)) if narrowed else list(range(len(probs)))
    kept, before = [], 0.0
    for rank, i in enumerate(order):
        if not narrowed or (rank < top_k and before <= top_p):
            kept.append(i)
        before += probs[i]
    target, sum_so_far = uniform * sum(probs[i] for i in kept), 0.0
    for i in kept:
        sum_so_far += probs[i]
        if sum_so_far > target:
            break
    return i, math.log(probs[i])


@given(st.integers(0, 10_000))
def test_drawing_equals_the_slow_reference(seed):
    generator = torch.Generator().manual_seed(seed)
    rows, vocab = 6, 12
    logits = torch.randn(rows, vocab, generator=generator) * 2
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.0, 1.7, 1.0])
    top_p = torch.tensor([1.0, 1.0, 0.8, 1.0, 0.6, 0.05], dtype=torch.float64)
    top_k = torch.tensor([vocab, vocab, vocab, 3, 5, 1])
    uniform = torch.rand(rows, generator=generator, dtype=torch.float64)
    tokens, log_probs = draw(logits, temperature, top_p, top_k, uniform)
    for row in range(rows):
        values = (column[row].tolist() for column in (logits, temperature, top_p, top_k, uniform))
        token, log_prob = slow_draw(*values)
        assert tokens[row] == token
        assert log_probs[row] == pytest.approx(log_prob, abs=1e-5)


@given(st.integers(0, 10_000))
def test_the_support_of_a_drawn_token_is_what_could_be_drawn(seed):
    """Every number of the unit interval draws a token of the support, and each of its tokens is drawn by some."""
    generator = torch.Generator().manual_seed(seed)
    vocab, numbers = 6, torch.linspace(0, 1 - 1e-9, 400, dtype=torch.float64)
    logits = 2 * torch.randn(1, vocab, generator=generator)
    temperature, top_p, top_k = (
        choices[[int(torch.randint(0, 3, (1,), generator=generator))]]
        for choices in (torch.tensor([0.0, 0.7, 1.5]), torch.tensor([1.0, 0.8, 0.3]).double(), torch.tensor([6, 3, 1]))
    )
    many = [column.expand(400, *column.shape[1:]) for column in (logits, temperature, top_p, top_k)]
    drawn, log_probs = draw(*many, numbers)
    ids, of_drawn = support(*many, drawn)
    assert all(row == ids[0] for row in ids)
    assert set(drawn.tolist()) <= set(ids[0])
    weights = torch.tensor([math.exp(z) for z in (logits[0] / max(float(temperature), 1e-9)).log_softmax(-1)])
    if temperature == 0:
        assert (len(ids[0]), set(of_drawn)) == (1, {0.0})
        return
    assert weights[ids[0]].diff().max() <= 0 if len(ids[0]) > 1 else True, "the likeliest first"
    share = weights / weights[ids[0]].sum()
    assert {token for token in ids[0] if share[token] > 0.005} <= set(drawn.tolist())
    assert of_drawn == pytest.approx(share[drawn].log().tolist(), abs=1e-5)


@pytest.mark.parametrize(("uniform", "narrow"), [(0.0, False), (1 - 2.0**-53, True), (1 - 2.0**-53, False)])
def test_the_ends_of_the_unit_interval_draw_a_possible_token(uniform, narrow):
    logits, one = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]), torch.ones(1, dtype=torch.float64)
    tokens, log_probs = draw(logits, torch.ones(1), one, torch.tensor([2 if narrow else 4]), one * uniform)
    assert tokens.item() in (1, 2) and log_probs.isfinite().all()


@given(st.integers(0, 10_000), st.sampled_from([257, 512, 700]))
def test_a_large_vocabulary_is_searched_in_blocks_with_the_same_result(seed, vocab):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(32, vocab, generator=generator) * 4
    logits[:, ::3] = -torch.inf
    uniform = torch.rand(32, dtype=torch.float64, generator=generator)
    uniform[:3] = torch.tensor([0.0, 1 - 2.0**-53, 0.5])
    ones = torch.ones(32)
    tokens, _ = draw(logits, ones, ones.double(), torch.full((32,), vocab), uniform)
    probs = logits.double().softmax(-1)
    own, end = (x.gather(1, tokens[:, None])[:, 0] for x in (probs, probs.cumsum(-1)))
    assert (own > 0).all()
    assert (end - own <= uniform + 1e-6).all() and (uniform <= end + 1e-6).all()  # sums of float32 probabilities


def test_large_vocabularies_are_drawn_in_chunks_with_the_same_result(monkeypatch):
    torch.manual_seed(0)
    logits, ones = torch.randn(7, 10), torch.ones(7)
    uniform = torch.rand(7, dtype=torch.float64)
    args = (logits, ones, ones.double() * 0.9, torch.full((7,), 10), uniform)
    whole = draw(*args)
    monkeypatch.setattr("megarl.hf_server.sampling._MAX_ELEMENTS", 25)
    parts = draw(*args)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


def test_uniform_numbers_look_uniform_and_uncorrelated():
    keys = torch.tensor([row_key(0, i) for i in range(200)]).repeat_interleave(200)
    counters = torch.arange(200).repeat(200)
    u = uniforms(keys, counters).reshape(200, 200)
    assert u.min() >= 0 and u.max() < 1
    assert u.mean().item() == pytest.approx(0.5, abs=0.01)
    assert u.var().item() == pytest.approx(1 / 12, abs=0.005)
    assert abs(torch.corrcoef(torch.stack([u[:, :-1].flatten(), u[:, 1:].flatten()]))[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack([u[:-1].flatten(), u[1:].flatten()]))[0, 1]) < 0.02


@given(st.integers(0, 2**31 - 1), st.integers(0, 1000))
def test_row_keys_are_signed_64_bit_and_differ_between_completions(seed, completion):
    key = row_key(seed, completion)
    assert -(2**63) <= key < 2**63
    assert key != row_key(seed, completion + 1)
    assert key != row_key(seed + 1, completion)
