"""Every policy loss against plain Python per sequence: values, statistics, and gradients by differences."""

import math
from typing import Any

import algo_reference as ref
import pytest
import torch
from algo_reference import Packed, packs, random_packed
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo import POLICY_LOSSES
from megarl.algo.hyperparameters import keyword_names
from megarl.algo.losses.ratio import importance_ratio
from megarl.algo.segments import clean

D = torch.float64
NAMES = ("log_probs", "old_log_probs", "advantages")
CASES = [(name, settings) for name, reference in ref.POLICY_LOSSES.items() for settings in reference.settings]
every_case = pytest.mark.parametrize(
    ("name", "settings"), CASES, ids=[f"{name}-{'-'.join(settings)}" for name, settings in CASES]
)


def test_every_policy_loss_has_a_reference() -> None:
    assert ref.missing(POLICY_LOSSES, ref.POLICY_LOSSES) == ""


def call(name: str, *columns: torch.Tensor, selected: torch.Tensor, **settings: Any):
    function = POLICY_LOSSES[name].function
    extra = {"selected": selected} if "selected" in keyword_names(function) else {}
    return function(*columns, **extra, **settings)


def at_probabilities(new: list[float], old: list[float], advantages: list[float]) -> tuple[torch.Tensor, ...]:
    columns = (torch.tensor(x, dtype=D) for x in (new, old, advantages))
    return *columns, torch.ones(len(new)) != 0, torch.zeros(len(new), dtype=torch.int64)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_nothing_is_clipped_without_an_advantage_or_where_rounding_put_a_log_prob_above_zero(name: str) -> None:
    for columns in (
        at_probabilities([math.log(0.9), math.log(0.1)], [math.log(0.1), math.log(0.9)], [0.0, 0.0]),
        at_probabilities([1e-6, 0.0], [0.0, 0.0], [1.0, -1.0]),  # both probabilities are 1
        at_probabilities([1e-6], [-1e-3], [1.0]),  # 1 - p is 0, not below: k = 0.0105
    ):
        loss, info = call(name, *columns, selected=columns[0])
        assert loss.isfinite().all() and not info["pg_clipfrac"].any()


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("ppo", {"clip_low": -0.1}, "clip_low=-0.1, .*: expected 0 <= clip_low <= 1"),
        ("ppo", {"clip_low": 1.1}, "clip_low=1.1, .*: expected 0 <= clip_low <= 1"),
        ("gspo", {"clip_high": -1.0}, "clip_high=-1.0: .*0 <= clip_high"),
        ("ppo", {"clip_c": 1.0}, 'clip_c=1.0: expected a number above 1, or "off"'),
        ("cispo", {"clip_low": 1.1}, "clip_low=1.1"),
        ("gmpo", {"clip_low": -0.1}, "clip_low=-0.1.*: expected numbers that are not below 0"),
        ("dppo_tv", {"clip_high": -0.1}, "clip_high=-0.1"),
        ("dppo_kl", {"dppo_ratio_cap": 0.0}, "dppo_ratio_cap=0.0: expected a number above 0"),
        ("sapo", {"tau_neg": 0.0}, "tau_neg=0.0: expected a number above 0"),
        ("dro", {"beta": -1.0}, "beta=-1.0"),
    ],
)
def test_hyperparameters_without_meaning_are_refused(name: str, settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(name, *at_probabilities([0.0], [0.0], [1.0]), selected=torch.zeros(1), **settings)


def test_equal_log_probs_give_exactly_one() -> None:
    x = torch.randn(1000)
    assert torch.equal(importance_ratio(x, x), torch.ones(1000))


def test_aliases() -> None:
    assert POLICY_LOSSES["vanilla"] is POLICY_LOSSES["grpo"] is POLICY_LOSSES["ppo"]
    assert POLICY_LOSSES["geo_mean"] is POLICY_LOSSES["gmpo"]


def run(name: str, settings: dict[str, Any], packed: Packed, log_probs: torch.Tensor | None = None):
    """(token loss, statistics, mask), the columns cleaned as ActorLoss does."""
    batch = packed.batch
    mask = batch.columns["response_mask"] != 0
    col = {n: clean(batch.columns[n], mask) for n in (*NAMES, "selected")}
    if log_probs is not None:
        col["log_probs"] = clean(log_probs, mask)
    columns = (*(col[n] for n in NAMES), mask, batch.segment_ids)
    loss, info = call(name, *columns, selected=col["selected"], **settings)
    assert all(column.shape == mask.shape for column in info.values())
    return loss, info, mask


def slow_tokens(name: str, settings: dict[str, Any], packed: Packed, moved=None) -> list[ref.Token]:
    """The reference on the trainable tokens of each sequence; `moved`: (sequence, trainable token, change of l)."""
    columns = {n: packed.lists(n) for n in (*NAMES, "selected")}
    out = []
    for b, mask in enumerate(packed.masks):
        new, old, advantages, selected = ([x for x, m in zip(c[b], mask, strict=True) if m] for c in columns.values())
        still = list(new)
        if moved is not None and moved[0] == b:
            new[moved[1]] += moved[2]
        out += ref.policy_tokens(name, new, old, advantages, selected=selected, constant=still, **settings)
    return out


@given(packs, st.sampled_from(CASES))
def test_every_loss_agrees_with_the_slow_reference(packed: Packed, case) -> None:
    loss, info, mask = run(*case, packed)
    slow = slow_tokens(*case, packed)
    assert loss[mask].tolist() == pytest.approx([token_loss for token_loss, _ in slow], rel=1e-9, abs=1e-11)
    for name in info if slow else ():
        assert info[name][mask].tolist() == [own[name] for _, own in slow]
    assert not slow or info.keys() == slow[0][1].keys()


@every_case
def test_gradients_agree_with_finite_differences(name: str, settings: dict[str, Any]) -> None:
    """By differences of the reference with what stands under stop-gradient held still."""
    packed = random_packed([4, 0, 1, 6], 5)
    log_probs = packed.batch.columns["log_probs"].clone().requires_grad_()
    loss, _, mask = run(name, settings, packed, log_probs)
    analytic = torch.autograd.grad(clean(loss, mask).sum(), log_probs)[0]
    assert analytic[~mask].abs().sum() == 0
    eps, slopes = 1e-6, []
    for b, masks in enumerate(packed.masks):
        for t in range(sum(masks)):
            up, down = (slow_tokens(name, settings, packed, (b, t, sign * eps)) for sign in (1, -1))
            slopes.append(sum(x - y for (x, _), (y, _) in zip(up, down, strict=True)) / (2 * eps))
    assert analytic[mask].tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, D])
@every_case
def test_ratios_up_to_e45_stay_finite(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    old = torch.tensor([-46.0, -0.5, -46.0, -0.5, -1.0], dtype=dtype)
    log_probs = (old + torch.tensor([45.0, -45.0, 45.0, -45.0, 0.0], dtype=dtype)).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0], dtype=dtype)
    mask = torch.ones(5, dtype=torch.bool)
    for apart, segment_ids in ((True, torch.arange(5)), (False, torch.zeros(5, dtype=torch.int64))):
        loss, _ = call(name, log_probs, old, advantages, mask, segment_ids, selected=mask, **settings)
        (slope,) = torch.autograd.grad(loss.sum(), log_probs)
        assert loss.isfinite().all() and slope.isfinite().all()
        if apart:  # each token a sequence
            columns = (x.tolist() for x in (log_probs, old, advantages))
            slow = [ref.policy_tokens(name, [x], [o], [a], selected=[1.0], **settings)[0][0]
                    for x, o, a in zip(*columns, strict=True)]  # fmt: skip
            assert loss.tolist() == pytest.approx(slow, rel=1e-4, abs=1e-5)
            assert loss.abs().max().item() <= math.exp(20) * 1.01


@every_case
@pytest.mark.parametrize("lengths", [[], [2, 0, 3]])
def test_no_trainable_token_at_all_is_no_trouble(name: str, settings: dict[str, Any], lengths: list[int]) -> None:
    packed = random_packed(lengths, 4)
    batch = packed.batch.with_columns(response_mask=torch.zeros(sum(lengths), dtype=D))
    log_probs = batch.columns["log_probs"].clone().requires_grad_()
    loss, _, mask = run(name, settings, Packed(batch), log_probs)
    total = clean(loss, mask).sum()
    total.backward()
    assert total.item() == 0.0
    assert log_probs.grad.tolist() == [0.0] * sum(lengths)
