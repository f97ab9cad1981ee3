"""Every policy loss with numbers worked out by hand: value, gradient and statistics."""

import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from megarl.algo import POLICY_LOSSES
from megarl.algo.losses.clipped import gmpo, gspo, ppo
from megarl.algo.losses.covariance import clip_cov, kl_cov
from megarl.algo.losses.ratio import importance_ratio
from megarl.algo.losses.weighted import cispo, dppo_kl, dppo_tv, dro, gpg, reinforce, sapo

D = torch.float64
LOG = math.log


def columns(log_ratios, advantages, old=None, segments=None, mask=None):
    """(log_probs, old_log_probs, advantages, mask, segment_ids) of packed tokens with these log-ratios."""
    n = len(log_ratios)
    old = torch.linspace(-2, -1, n, dtype=D) if old is None else torch.tensor(old, dtype=D)
    new = old + torch.tensor(log_ratios, dtype=D)
    segment_ids = torch.tensor([0] * n if segments is None else segments)
    live = torch.tensor([True] * n if mask is None else mask)
    return new.requires_grad_(), old, torch.tensor(advantages, dtype=D), live, segment_ids


def gradient(loss, new):
    return torch.autograd.grad(loss.sum(), new)[0].tolist()


def test_ppo_by_hand():
    ratios = [1.0, 1.5, 0.5, 1.5, 0.5, 4.0, 1.1]
    advantages = [2.0, 2.0, 2.0, -2.0, -2.0, -2.0, 0.0]
    loss, info = ppo(*columns([LOG(r) for r in ratios], advantages))
    #        in range, clipped above, free below, free above, clipped below, dual clip (3 * 2), no advantage
    assert loss.tolist() == pytest.approx([-2.0, -2.4, -1.0, 3.0, 1.6, 6.0, 0.0])
    assert info["pg_clipfrac"].tolist() == [False, True, False, False, True, False, False]
    assert info["pg_clipfrac_lower"].tolist() == [False, False, False, False, False, True, False]


def test_ppo_gradient_by_hand():
    ratios = [1.0, 1.5, 0.5, 1.5, 0.5, 4.0]
    new, *rest = columns([LOG(r) for r in ratios], [2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    # dL/dl = -A r where no clip holds, else 0; at ratio 1 both branches are equal and share it
    assert gradient(ppo(new, *rest)[0], new) == pytest.approx([-2.0, 0.0, -1.0, 3.0, 0.0, 0.0])


def test_clip_settings_are_used_one_by_one():
    new, *rest = columns([LOG(1.25), LOG(0.85), LOG(10.0)], [1.0, -1.0, -1.0])
    assert ppo(new, *rest, clip_high=0.3)[0].tolist() == pytest.approx([-1.25, 0.85, 3.0])
    assert ppo(new, *rest, clip_low=0.1)[0].tolist() == pytest.approx([-1.2, 0.9, 3.0])
    assert ppo(new, *rest, clip_c=5.0)[0].tolist() == pytest.approx([-1.2, 0.85, 5.0])
    loss, info = ppo(new, *rest, clip_c=None)
    assert loss.tolist() == pytest.approx([-1.2, 0.85, 10.0])
    assert "pg_clipfrac_lower" not in info


@pytest.mark.parametrize("plain", [reinforce, gpg])
def test_reinforce_and_gpg_by_hand(plain):
    new, *rest = columns([0.0, 0.5], [3.0, -1.0])
    loss, info = plain(new, *rest)
    assert loss.tolist() == pytest.approx([6.0, -0.5])  # -3 * -2, +1 * (-1 + 0.5)
    assert gradient(loss, new) == [-3.0, 1.0]
    assert info == {}


def test_gspo_by_hand():
    # sequence 0: ratios 1.21 and 1, geometric mean 1.1, its masked token counts for nothing;  sequence 2: 0.5
    new, *rest = columns([LOG(1.21), 0.0, 7.0, LOG(0.5)], [1.0, 2.0, 9.0, 3.0], None, [0, 0, 0, 2], [1, 1, 0, 1])
    new, old, advantages, mask, segment_ids = new, *rest
    rest = (old, advantages, mask.bool(), segment_ids)
    loss, info = gspo(new, *rest, clip_low=0.2, clip_high=0.2)
    assert loss[[0, 1, 3]].tolist() == pytest.approx([-1.1, -2.2, -1.5])
    assert gradient(loss[[0, 1, 3]], new) == pytest.approx([-1.1, -2.2, 0.0, -1.5])
    loss, info = gspo(new, *rest)  # 1 - 3e-4 .. 1 + 4e-4
    assert loss[[0, 1, 3]].tolist() == pytest.approx([-1.0004, -2.0008, -1.5])
    assert info["pg_clipfrac"][[0, 1, 3]].tolist() == [True, True, False]
    assert gradient(loss[[0, 1, 3]], new) == pytest.approx([0.0, 0.0, 0.0, -1.5])


def test_gmpo_by_hand():
    # A of sequence 0 is 2: log-ratio 1 is clipped to 0.4, -1 is not;  of sequence 1 is -1: -1 is clipped to -0.4
    new, *rest = columns([1.0, -1.0, 1.0, -1.0], [1.0, 3.0, -1.0, -1.0], None, [0, 0, 1, 1])
    loss, info = gmpo(new, *rest)
    first, second = -2 * math.exp((0.4 - 1) / 2), math.exp((1 - 0.4) / 2)
    assert loss.tolist() == pytest.approx([first, first, second, second])
    assert info["pg_clipfrac"].tolist() == [True, False, False, True]
    # the mean over a sequence's tokens is L_b; dL_b/dl is L_b / n where d' follows l
    assert gradient(loss / 2, new) == pytest.approx([0.0, first / 2, second / 2, 0.0])


def test_cispo_by_hand():
    new, *rest = columns([LOG(1.5), LOG(0.5), 0.0], [2.0, -1.0, 1.0], [-1.0, -1.0, -1.0])
    loss, info = cispo(new, *rest)
    by_hand = [-1.2 * 2 * (LOG(1.5) - 1), 0.8 * (LOG(0.5) - 1), 1.0]
    assert loss.tolist() == pytest.approx(by_hand)
    assert gradient(loss, new) == pytest.approx([-2.4, 0.8, -1.0])
    assert info["pg_clipfrac"].tolist() == [True, True, False]
    assert gradient(cispo(new, *rest, clip_low=1.0)[0], new) == pytest.approx([-2.4, 0.5, -1.0])


def test_sapo_by_hand():
    new, *rest = columns([0.0, LOG(2.0), LOG(2.0), 0.0], [1.0, 1.0, -1.0, -2.0])
    loss, _ = sapo(new, *rest)
    gate = {tau: math.exp(float(logsigmoid(torch.tensor(tau, dtype=D)))) for tau in (1.0, 1.05)}
    assert loss.tolist() == pytest.approx([-2.0, -4 * gate[1.0], gate[1.05] * 4 / 1.05, 2 * 0.5 * 4 / 1.05])
    slopes = [-1.0, -4 * gate[1.0] * (1 - gate[1.0]) * 2, 4 * gate[1.05] * (1 - gate[1.05]) * 2, 2.0]
    assert gradient(loss, new) == pytest.approx(slopes)


def at_probabilities(new, old, advantages):
    old = [LOG(p) for p in old]
    return columns([LOG(p) - o for p, o in zip(new, old, strict=True)], advantages, old)


def test_dppo_tv_by_hand():
    #        up too far, up a little, down too far, back up with A < 0, down with A > 0
    new, *rest = at_probabilities([0.5, 0.4, 0.2, 0.6, 0.1], [0.3, 0.3, 0.4, 0.3, 0.4], [1.0, 1.0, -1.0, -1.0, 1.0])
    loss, info = dppo_tv(new, *rest)
    assert loss.tolist() == pytest.approx([0.0, -LOG(0.4) * 0.4 / 0.3, 0.0, LOG(0.6) * 2, -LOG(0.1) / 4])
    assert gradient(loss, new) == pytest.approx([0.0, -4 / 3, 0.0, 2.0, -0.25])
    assert info["pg_clipfrac"].tolist() == [True, False, True, False, False]
    assert dppo_tv(new, *rest, clip_high=0.3, clip_low=0.3)[1]["pg_clipfrac"].tolist() == [False] * 5
    assert gradient(dppo_tv(new, *rest, dppo_ratio_cap=1.5)[0], new) == pytest.approx([0.0, -4 / 3, 0.0, 1.5, -0.25])


def test_dppo_kl_by_hand():
    def kl(p_old, p):
        return p_old * LOG(p_old / p) + (1 - p_old) * LOG((1 - p_old) / (1 - p))

    assert kl(0.3, 0.5) > 0.05 > kl(0.3, 0.4)
    assert kl(0.4, 0.2) > 0.05
    new, *rest = at_probabilities([0.5, 0.4, 0.2, 0.6, 0.1], [0.3, 0.3, 0.4, 0.3, 0.4], [1.0, 1.0, -1.0, -1.0, 1.0])
    loss, info = dppo_kl(new, *rest)
    assert gradient(loss, new) == pytest.approx([0.0, -4 / 3, 0.0, 2.0, -0.25])
    assert info["pg_clipfrac"].tolist() == [True, False, True, False, False]
    wide = kl(0.3, 0.5) + 1e-6
    assert dppo_kl(new, *rest, clip_high=wide)[1]["pg_clipfrac"].tolist() == [False, False, True, False, False]


def test_dppo_without_an_advantage_clips_nothing():
    new, *rest = at_probabilities([0.9, 0.1], [0.1, 0.9], [0.0, 0.0])
    for loss_fn in (dppo_tv, dppo_kl):
        assert not loss_fn(new, *rest)[1]["pg_clipfrac"].any()


def test_dppo_takes_a_log_prob_that_rounding_put_above_zero():
    new, *rest = columns([1e-6, 0.0], [1.0, -1.0], [0.0, 0.0])
    for loss_fn in (dppo_tv, dppo_kl):
        loss, info = loss_fn(new, *rest)
        assert loss.isfinite().all()
        assert not info["pg_clipfrac"].any()  # both probabilities are 1
    new, *rest = columns([1e-3 + 1e-6], [1.0], [-1e-3])  # 1 - p is 0, not below: k = 0.0105
    assert not dppo_kl(new, *rest)[1]["pg_clipfrac"].any()


def test_dro_by_hand():
    new, *rest = columns([0.5, -1.0], [2.0, -1.0], [-1.0, -1.0])
    loss, _ = dro(new, *rest, beta=0.4)
    assert loss.tolist() == pytest.approx([1.0 + 0.2 * 0.25, -2.0 + 0.2 * 1.0])
    assert gradient(loss, new) == pytest.approx([-2 + 0.4 * 0.5, 1 - 0.4])


def test_clip_cov_by_hand():
    new, *rest = columns([LOG(1.5), LOG(1.5), LOG(1.1), LOG(5.0)], [1.0, 1.0, 1.0, -1.0])
    selected = torch.tensor([0.0, 1.0, 1.0, 0.0])
    loss, info = clip_cov(new, *rest, selected=selected)
    assert loss.tolist() == pytest.approx([-1.2, 0.0, 0.0, 5.0])  # no dual clip
    assert gradient(loss, new) == pytest.approx([0.0, 0.0, 0.0, 5.0])
    assert info["pg_clipfrac"].tolist() == [True, False, False, False]
    assert info["cov_selected"].tolist() == [False, True, True, False]


def test_kl_cov_by_hand():
    new, *rest = columns([LOG(2.0), LOG(2.0), LOG(0.5)], [1.0, 1.0, -1.0])
    loss, info = kl_cov(new, *rest, selected=torch.tensor([0.0, 1.0, 1.0]))
    assert loss.tolist() == pytest.approx([-2.0, -2 + 0.1 * LOG(2), 0.5 + 0.1 * LOG(2)])
    assert gradient(loss, new) == pytest.approx([-2.0, -1.9, 0.5 - 0.1])
    assert info["cov_selected"].tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("name", "hyperparameters", "sentence"),
    [
        ("ppo", {"clip_low": -0.1}, "clip_low=-0.1"),
        ("ppo", {"clip_low": 1.1}, "expected 0 <= clip_low <= 1"),
        ("gspo", {"clip_high": -1.0}, "0 <= clip_high"),
        ("ppo", {"clip_c": 1.0}, 'clip_c=1.0: expected a number above 1, or "off"'),
        ("cispo", {"clip_low": 1.1}, "clip_low=1.1"),
        ("gmpo", {"clip_low": -0.1}, "expected numbers that are not below 0"),
        ("dppo_tv", {"clip_high": -0.1}, "clip_high=-0.1"),
        ("dppo_kl", {"dppo_ratio_cap": 0.0}, "dppo_ratio_cap=0.0: expected a number above 0"),
        ("sapo", {"tau_neg": 0.0}, "tau_neg=0.0: expected a number above 0"),
        ("dro", {"beta": -1.0}, "beta=-1.0"),
    ],
)
def test_knobs_without_meaning_are_refused(name, hyperparameters, sentence):
    with pytest.raises(ValueError, match=sentence):
        POLICY_LOSSES[name].function(*columns([0.0], [1.0]), **hyperparameters)


def test_equal_log_probs_give_exactly_one():
    x = torch.randn(1000)
    assert torch.equal(importance_ratio(x, x), torch.ones(1000))


def test_aliases():
    assert POLICY_LOSSES["vanilla"] is POLICY_LOSSES["grpo"] is POLICY_LOSSES["ppo"]
    assert POLICY_LOSSES["geo_mean"] is POLICY_LOSSES["gmpo"]
