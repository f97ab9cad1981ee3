"""Policy losses written in verl's documented way, the printed one among them, run exactly under any split."""

import math
from pathlib import Path

import pytest
import torch
from algo_reference import random_packed
from torch.nn.functional import pad

from megarl import algo
from megarl.algo import ActorLoss, load_plugins, register_policy_loss, step_columns
from megarl.algo.rehearsal import rehearse
from megarl.samples.batch import merge_stats

D = torch.float64
PRINTED = Path(__file__).parents[2] / "fixtures" / "source_documents" / "policy_loss_function.txt"
LENGTHS = [5, 4, 9, 3, 7, 2]
MODES = ["token_level", "sample_level"]


@pytest.fixture
def printed(tables, tmp_path):
    """The documents' function, pasted into a file character by character."""
    path = tmp_path / "my_loss.py"
    path.write_text(PRINTED.read_text())
    load_plugins([str(path)])


def printed_function():
    """The bare function of the text, as the documents' reader would call it."""
    found = {}
    text = PRINTED.read_text().replace("from verl.trainer.ppo.core_algos import register_policy_loss", "")
    space = {"register_policy_loss": lambda name: lambda function: found.setdefault(name, function)}
    exec(text, space)
    return found["my_ppo_variant"]


def whole_step(mode, seed=0, lengths=LENGTHS):
    batch = random_packed(lengths, seed).batch
    return step_columns(batch, loss=ActorLoss(), agg_mode=mode)


def padded(batch, log_probs):
    """[B, sequence] as the documents want it: sequences with a trainable token, NaN at masked places out."""
    mask = batch.columns["response_mask"] != 0
    names = ("old_log_probs", "advantages", "response_mask")
    columns = {name: torch.where(mask, batch.columns[name], 0.0) for name in names}
    columns["log_probs"] = torch.where(mask, log_probs, 0.0)
    rows = {name: batch.split(column) for name, column in columns.items()}
    live = [b for b, part in enumerate(batch.split(mask)) if part.any()]
    width = int(batch.sample_lengths.max())
    return {n: torch.stack([pad(parts[b], (0, width - len(parts[b]))) for b in live]) for n, parts in rows.items()}


@pytest.mark.filterwarnings("ignore:std..:UserWarning")  # of one token
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(2))
def test_the_printed_loss_is_what_it_is_on_the_whole_step_however_that_is_split(printed, mode, seed):
    step, loss_fn = whole_step(mode, seed), ActorLoss("my_ppo_variant")
    log_probs = step.columns["log_probs"].clone().requires_grad_()
    wanted, _ = printed_function()(**padded(step, log_probs), loss_agg_mode=mode)
    (slope,) = torch.autograd.grad(wanted, log_probs)
    for split in ([[0, 1, 2, 3, 4, 5]], [[4, 0], [1], [5, 3, 2]], [[i] for i in range(6)]):
        total, slopes = 0.0, torch.zeros_like(slope)
        places = torch.arange(step.num_tokens).split(LENGTHS)
        for indices in split:
            micro = step.select(indices)
            micro_log_probs = micro.columns["log_probs"].clone().requires_grad_()
            out = loss_fn(micro, {"log_probs": micro_log_probs})
            out.loss.backward()
            total += out.loss.item()
            slopes[torch.cat([places[i] for i in indices])] = micro_log_probs.grad
        assert total == pytest.approx(wanted.item(), rel=1e-10)
        assert torch.allclose(slopes, torch.where(step.columns["response_mask"] != 0, slope, 0.0), atol=1e-12)


@pytest.mark.parametrize("mode", ["token-sum", "seq-mean-token-sum", "prompt-mean-token-mean"])
def test_the_printed_loss_has_every_aggregation(printed, mode):
    """Of its token losses: -min(A r, A clip(r)) - 0.01 exp(l) l, the sign of the last as printed."""
    step = whole_step(mode)
    out = ActorLoss("my_ppo_variant")(step, {"log_probs": step.columns["log_probs"]})
    mask = step.columns["response_mask"] != 0
    new, old, a = (step.columns[n][mask] for n in ("log_probs", "old_log_probs", "advantages"))
    r = (new - old).exp()
    token_loss = -torch.min(r * a, r.clamp(0.8, 1.2) * a) + 0.01 * -new.exp() * new
    assert out.loss.item() == pytest.approx(float((step.columns["weight"][mask] * token_loss).sum()))


def test_its_diagnostics_are_logged_under_its_own_name(printed):
    step = whole_step("sample_level")
    stats = ActorLoss("my_ppo_variant")(step, {"log_probs": step.columns["log_probs"]}).stats
    own = {name.removeprefix("actor/my_ppo_variant/") for name in stats if "my_ppo_variant" in name}
    assert own == {"policy_loss", "entropy_bonus", "ratio_mean", "ratio_std", "ratio_min", "ratio_max"}
    assert stats["actor/my_ppo_variant/ratio_mean"].result() == pytest.approx(stats["actor/ratio_mean"].result())
    micros = [step.select([i]) for i in range(6)]
    parts = [ActorLoss("my_ppo_variant")(m, {"log_probs": m.columns["log_probs"]}).stats for m in micros]
    for name, stat in merge_stats(parts).items():
        assert stat.result() == pytest.approx(stats[name].result(), abs=1e-12)


@pytest.mark.filterwarnings("ignore:std..:UserWarning")
def test_a_diagnostic_that_is_not_finite_counts_as_zero(printed):
    step = whole_step("token_level", lengths=[2, 2, 2])
    stats = ActorLoss("my_ppo_variant")(step, {"log_probs": step.columns["log_probs"]}).stats
    assert all(math.isfinite(stat.value) for stat in stats.values())


def test_no_trainable_token_is_zero_with_zero_gradients(printed):
    step = whole_step("token_level").with_columns(response_mask=torch.zeros(sum(LENGTHS), dtype=D))
    log_probs = step.columns["log_probs"].clone().requires_grad_()
    out = ActorLoss("my_ppo_variant")(step, {"log_probs": log_probs})
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert not log_probs.grad.any()


def test_a_weight_of_rollout_correction_is_one_number_a_sequence(printed):
    assert algo.POLICY_LOSSES["my_ppo_variant"].per_sequence
    weights = torch.tensor([2.0] * 5 + [0.5] * 25, dtype=D)
    loss = ActorLoss("my_ppo_variant", use_rollout_weight=True)
    step = step_columns(whole_step("token-mean").with_columns(rollout_weight=weights), loss=loss, agg_mode="token-mean")
    total = loss(step, {"log_probs": step.columns["log_probs"]}).loss.item()
    micros = [step.select([i]) for i in range(6)]
    each = [ActorLoss("my_ppo_variant")(m, {"log_probs": m.columns["log_probs"]}).loss for m in micros]
    assert total == pytest.approx(float(2 * each[0] + 0.5 * sum(each[1:])))


def masked_mean(x, mask, mode):
    per_token = (x * mask).sum() / mask.sum()
    per_sequence = ((x * mask).sum(1) / mask.sum(1)).mean()
    return per_token if mode == "token_level" else per_sequence


def actor(function):
    register_policy_loss("mine")(function)
    loss = ActorLoss("mine")
    rehearse(loss)
    return loss


@pytest.mark.parametrize(
    ("own", "kept", "refused"), [(0, "token-mean", "seq-mean-token-mean"), (1, "seq-mean-token-mean", "token-mean")]
)
def test_a_loss_that_ignores_its_mode_has_only_that_one(tables, own, kept, refused):
    def deaf(old_log_probs, log_probs, advantages, response_mask, loss_agg_mode="token_level", config=None):
        return masked_mean(-advantages * log_probs, response_mask, MODES[own]), {}

    loss_fn = actor(deaf)
    loss_fn.require_agg_mode(kept)
    loss_fn.require_agg_mode(MODES[own])
    with pytest.raises(ValueError, match=f"loss_agg_mode={refused}: .* mine .* always computes {kept}, expected that"):
        loss_fn.require_agg_mode(refused)
    with pytest.raises(ValueError, match="always computes"):
        step_columns(whole_step(refused), loss=loss_fn, agg_mode=refused)


def test_the_servers_log_probs_reach_a_loss_that_takes_them(tables):
    def off_policy(old_log_probs, log_probs, advantages, response_mask, loss_agg_mode, config, rollout_log_probs):
        return masked_mean(-advantages * (log_probs - rollout_log_probs).exp(), response_mask, loss_agg_mode), {}

    loss_fn = actor(off_policy)
    assert loss_fn.columns[-1] == "rollout_log_probs"
    step = whole_step("token-mean")
    live = step.columns["response_mask"] != 0
    new, rollout, a = (step.columns[n][live] for n in ("log_probs", "rollout_log_probs", "advantages"))
    total = loss_fn(step, {"log_probs": step.columns["log_probs"]}).loss
    assert total.item() == pytest.approx(float((-a * (new - rollout).exp()).mean()))


def test_config_holds_the_arguments_of_the_loss(tables):
    @register_policy_loss("mine")
    def mine(old_log_probs, log_probs, advantages, response_mask, loss_agg_mode, config):
        scale = config.scale * config.get("more", 1.0)
        return masked_mean(-scale * advantages * log_probs, response_mask, loss_agg_mode), {}

    step = whole_step("token-mean")
    outputs = {"log_probs": step.columns["log_probs"]}
    one, six = (ActorLoss("mine", args=a)(step, outputs).loss for a in ({"scale": 1.0}, {"scale": 3.0, "more": 2.0}))
    assert six.item() == pytest.approx(6 * one.item())
    for how, sentence in (
        ({"args": {"scale": 1.0, "other": 1.0}}, "policy_loss_args.other=1.0: the policy loss mine does not read"),
        ({"args": {"more": 1.0}}, "config.scale is not set, expected a number in algorithm.policy_loss_args.scale"),
        ({}, "None without any"),
        ({"args": {"scale": 1.0}, "clip_low": 0.1}, "actor.clip_ratio_low=0.1: the policy loss mine has no such clip"),
    ):
        with pytest.raises(ValueError, match=sentence):
            rehearse(ActorLoss("mine", **how))


def standardised(old, new, a, mask, mode):
    spread = ((a - a[mask > 0].mean()) * mask).square().sum().sqrt()
    return masked_mean(-a / spread * new, mask, mode), {}


BAD = {
    "mixes sequences": (standardised, "it mixes sequences, counts masked tokens, bounds its denominator, or sums"),
    "counts padding": (lambda old, new, a, mask, mode: ((-a * new).mean(), {}), "mode='token_level' .* neither"),
    "sums": (lambda old, new, a, mask, mode: ((-a * new * mask).sum(), {}), "neither the mean over tokens"),
    "bounds its denominator": (
        lambda old, new, a, mask, mode: ((-a * new * mask).sum() / mask.sum().clamp(max=100), {}),
        "on two sequences, of 70 and 190 tokens, is neither the mean over tokens .* bounds its denominator",
    ),
    "other mean for long ones": (
        lambda old, new, a, mask, mode: (masked_mean(-a * new, mask, MODES[mask.shape[1] > 50]), {}),
        "of 70 and 190 tokens, is neither",
    ),
    "other way round": (
        lambda old, new, a, mask, mode: (masked_mean(-a * new, mask, MODES[mode == "token_level"]), {}),
        "averages over sequences for loss_agg_mode='token_level' and over tokens for 'sample_level'",
    ),
    "no gradient": (lambda old, new, a, mask, mode: (masked_mean(-a, mask, mode), {}), "does not depend on log_probs"),
    "one a token": (lambda old, new, a, mask, mode: (-a * new, {}), r"returns shape \(1?2?, ?5\), expected a scalar"),
    "no dictionary": (lambda old, new, a, mask, mode: masked_mean(-a * new, mask, mode), "expected it to return"),
    "a tensor as diagnostic": (
        lambda old, new, a, mask, mode: (masked_mean(-a * new, mask, mode), {"all": new}),
        "its diagnostic 'all' is .* expected one number",
    ),
    "fails": (lambda old, new, a, mask, mode: (1 / 0, {}), "ZeroDivisionError: division by zero, at .*py:"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_run_exactly_is_refused_before_the_run_with_the_reason(tables, what):
    function, sentence = BAD[what]

    @register_policy_loss("mine")
    def mine(old_log_probs, log_probs, advantages, response_mask, loss_agg_mode="token_level", config=None):
        return function(old_log_probs, log_probs, advantages, response_mask, loss_agg_mode)

    with pytest.raises(ValueError, match=sentence):
        rehearse(ActorLoss("mine"))


def test_a_parameter_without_a_value_is_refused_when_registered(tables):
    with pytest.raises(ValueError, match="policy loss 'mine': there is no value for its parameter entropy; expected"):
        register_policy_loss("mine")(lambda old_log_probs, log_probs, advantages, response_mask, entropy: ...)


def test_a_batch_is_never_changed_by_a_loss_that_writes_into_its_arguments(tables):
    def writes(old_log_probs, log_probs, advantages, response_mask, loss_agg_mode="token_level"):
        advantages *= 2
        return masked_mean(-advantages * log_probs, response_mask, loss_agg_mode), {}

    step = whole_step("token-mean")
    before = step.columns["advantages"].clone()
    actor(writes)(step, {"log_probs": step.columns["log_probs"]})
    assert torch.equal(step.columns["advantages"].nan_to_num(), before.nan_to_num())
