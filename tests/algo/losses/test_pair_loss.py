"""Losses of pairs against numbers worked out by hand, and against a slow second opinion under every cut of a step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algo import PairLoss, step_columns
from megarl.algo.losses.pairs import pair_loss
from megarl.samples.batch import SIGN, Batch, merge_stats


def test_the_formulas_by_hand() -> None:
    gap = torch.tensor([0.0, 2.0, -2.0], dtype=torch.float64)
    # beta h = 1 and -1: log(1 + e^-1) = 0.313262, log(1 + e) = 1.313262
    assert pair_loss(gap, beta=0.5).tolist() == pytest.approx([math.log(2), 0.3132617, 1.3132617], abs=1e-7)
    # of every ten labels one is wrong: 0.9 * 0.313262 + 0.1 * 1.313262
    smoothed = pair_loss(gap, beta=0.5, label_smoothing=0.1)
    assert smoothed.tolist() == pytest.approx([math.log(2), 0.4132617, 1.2132617], abs=1e-7)
    # 1 / (2 beta) = 1
    assert pair_loss(gap, "ipo", beta=0.5).tolist() == [1.0, 1.0, 9.0]


def test_the_gradient_of_dpo_pulls_both_answers_by_the_share_that_is_still_wrong() -> None:
    columns = {
        "response_mask": torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]),
        SIGN: torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
        "ref_log_probs": torch.tensor([math.nan, -1.0, -2.0, math.nan, -4.0]),
    }
    batch = Batch(torch.arange(5), torch.tensor([3, 2]), columns, rows=torch.tensor([2]))
    log_probs = torch.tensor([math.nan, -0.5, -1.5, math.nan, -5.0], requires_grad=True)
    loss = PairLoss(beta=0.5)
    out = loss(step_columns(batch, loss=loss, agg_mode="seq-mean-token-mean"), {"log_probs": log_probs})
    # h = (0.5 + 0.5) - (-1) = 2, so beta h = 1 and the gradient of a chosen token is -beta sigmoid(-1)
    assert out.loss.item() == pytest.approx(0.3132617, abs=1e-6)
    out.loss.backward()
    pull = 0.5 / (1 + math.e)
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([0.0, -pull, -pull, 0.0, pull], abs=1e-7)
    found = {name: stat.result() for name, stat in out.stats.items()}
    assert found == pytest.approx(
        {
            "pairs/accuracy": 1.0,
            "pairs/chosen": 0.5,
            "pairs/loss": 0.3132617,
            "pairs/margin": 1.0,
            "pairs/rejected": -0.5,
        },
        abs=1e-6,
    )


def test_bradley_terry_wants_the_chosen_answer_ahead_by_the_margin() -> None:
    columns = {
        "response_mask": torch.tensor([0.0, 1.0, 1.0] * 2),
        SIGN: torch.tensor([0.0, 1.0, -1.0] * 2),
        "margin": torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
    }
    batch = Batch(torch.arange(6), torch.tensor([2, 1] * 2), columns, rows=torch.tensor([2, 2]))
    loss = PairLoss(beta=1.0, output="values")
    values = torch.tensor([9.0, 3.0, 1.0, 9.0, 2.0, 2.0])
    out = loss(step_columns(batch, loss=loss, agg_mode="seq-mean-token-mean"), {"values": values})
    # 3 - 1 - 1 = 1, and 0
    assert out.loss.item() == pytest.approx((0.3132617 + math.log(2)) / 2, abs=1e-6)
    assert out.stats["pairs/accuracy"].result() == pytest.approx(0.75), "a tie is half right"


LOSSES = [PairLoss(beta=0.3), PairLoss(beta=0.3, label_smoothing=0.2), PairLoss("ipo", beta=0.4)]


def slow(loss: PairLoss, batch: Batch, log_probs: torch.Tensor) -> torch.Tensor:
    """The mean over pairs, token by token in Python."""
    losses = []
    columns = zip(
        *(batch.split(batch.columns[name]) for name in ("response_mask", SIGN, "ref_log_probs")),
        batch.split(log_probs),
        strict=True,
    )
    for mask, sign, reference, found in columns:
        gains: dict[float, list[torch.Tensor]] = {1.0: [], -1.0: []}
        for t in range(len(mask)):
            if mask[t]:
                gains[float(sign[t])].append(found[t] - reference[t])
        ahead = [sum(gain) / (len(gain) if loss.kind == "ipo" else 1) for gain in gains.values()]
        h = ahead[0] - ahead[1]
        if loss.kind == "ipo":
            losses.append((h - 1 / (2 * loss.beta)) ** 2)
        else:
            e = loss.label_smoothing
            p = 1 / (1 + torch.exp(-loss.beta * h))
            losses.append(-(1 - e) * torch.log(p) - e * torch.log(1 - p))
    return torch.stack(losses).mean()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=6), st.integers(0, 99), st.data())
def test_a_step_has_the_loss_and_gradient_of_the_formula_however_it_is_cut(
    sizes: list[tuple[int, int]], seed: int, data: st.DataObject
) -> None:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([size + 2 for pair in sizes for size in pair])  # two tokens of prompt
    n = int(lengths.sum())
    inside = torch.cat([torch.arange(int(length)) for length in lengths])
    columns = {
        "response_mask": (inside >= 2).double(),
        SIGN: torch.repeat_interleave(torch.tensor([1.0, -1.0] * len(sizes), dtype=torch.float64), lengths),
        "ref_log_probs": torch.randn(n, generator=g, dtype=torch.float64),
    }
    batch = Batch(torch.zeros(n, dtype=torch.int64), lengths, columns, rows=torch.full((len(sizes),), 2))
    log_probs = torch.randn(n, generator=g, dtype=torch.float64)
    order = data.draw(st.permutations(range(len(sizes))))
    cut = data.draw(st.integers(0, len(sizes)))
    for loss in LOSSES:
        whole = log_probs.clone().requires_grad_()
        expected = slow(loss, batch, whole)
        expected.backward()
        step = step_columns(batch, loss=loss, agg_mode="seq-mean-token-mean").with_columns(log_probs=log_probs)
        total, stats = 0.0, []
        gradient = torch.zeros(n, dtype=torch.float64)
        places = torch.arange(n).split(batch.sample_lengths.tolist())
        for part in filter(None, (order[:cut], order[cut:])):
            micro = step.select(part)
            found = micro.columns["log_probs"].clone().requires_grad_()
            out = loss(micro, {"log_probs": found})
            out.loss.backward()
            assert found.grad is not None
            gradient[torch.cat([places[pair] for pair in part])] = found.grad
            total += out.loss.item()
            stats.append(out.stats)
        assert total == pytest.approx(expected.item(), rel=1e-10)
        assert merge_stats(stats)["pairs/loss"].result() == pytest.approx(expected.item(), rel=1e-10)
        assert torch.allclose(gradient, whole.grad, rtol=1e-9, atol=1e-12)  # type: ignore[arg-type]
