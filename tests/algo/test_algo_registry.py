import inspect
import re
import subprocess
import sys

import pytest
import torch

from megarl import algo
from megarl.algo import (
    ActorLoss,
    NonFiniteError,
    estimate,
    kl_estimate,
    load_plugins,
    register_adv_est,
    register_kl,
    register_policy_loss,
    step_columns,
)
from megarl.algo.rehearsal import rehearse
from megarl.algo.segments import count_segments, segment_mean
from megarl.samples.batch import Batch

PLUGIN = """
import torch
from megarl.algo import register_adv_est, register_kl, register_policy_loss

@register_policy_loss("asymmetric")
def asymmetric(log_probs, old_log_probs, advantages, mask, segment_ids, *, clip_high=0.5):
    ratio = (log_probs - old_log_probs).exp().clamp(max=1 + clip_high)
    return -advantages * ratio, {"share_positive": advantages > 0}

@register_adv_est("constant")
def constant(rewards, mask, segment_ids, *, gamma, bonus=1.0):
    return torch.full_like(rewards, gamma + bonus), rewards

@register_kl("cube")
def cube(log_probs, ref_log_probs):
    return (log_probs - ref_log_probs).abs() ** 3
"""


def one_token() -> Batch:
    columns = {name: torch.tensor([1.0]) for name in ("weight", "response_mask", "old_log_probs", "advantages")}
    rows = {"score": torch.tensor([1.0]), "group": torch.tensor([0])}
    return Batch(torch.tensor([3]), torch.tensor([1]), columns, rows)


def test_a_users_file_adds_a_loss_an_estimator_and_a_kl(tables, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    load_plugins([str(path)])
    load_plugins([str(path)])  # once is enough
    out = ActorLoss("asymmetric", clip_high=1.0)(one_token(), {"log_probs": torch.tensor([6.0])})
    assert float(out.loss) == -2.0
    assert out.stats["actor/share_positive"].result() == 1.0
    batch, _ = estimate(one_token(), adv_estimator="constant", gamma=0.5)
    assert batch.columns["advantages"].tolist() == [1.5]
    assert kl_estimate("cube", torch.tensor([2.0]), torch.tensor([0.0])).tolist() == [8.0]
    with pytest.raises(ValueError, match=r"actor.clip_ratio_low=0.1: the policy loss asymmetric has no such clip"):
        rehearse(ActorLoss("asymmetric", clip_low=0.1))


@pytest.mark.parametrize("detached", [False, True])
def test_a_loss_that_mixes_tokens_says_so_when_it_is_registered(tables, detached):
    """Rows of its samples would part otherwise; a sequence's ratio without a gradient changes the loss alone."""

    def of_sequence(log_probs, old_log_probs, advantages, mask, segment_ids):
        change = log_probs - old_log_probs
        ratio = segment_mean(change.detach() if detached else change, mask, segment_ids, count_segments(segment_ids))
        return -advantages * log_probs * ratio.exp()[segment_ids], {}

    register_policy_loss("forgetful")(of_sequence)
    with pytest.raises(ValueError, match="policy loss forgetful: a token's loss depends on the others of its sequence"):
        rehearse(ActorLoss("forgetful"))
    register_policy_loss("told", per_sequence=True)(of_sequence)
    assert ActorLoss("told").per_sequence


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (lambda x: (x.mean(), {}), r"mine: its token loss has shape \(\), expected one number a token"),
        (lambda x: x, r"policy loss mine: expected it to return \(token loss"),
        (lambda x: (x, {"share": x.mean()}), r"mine: share has shape \(\), expected one number a token"),
        (lambda x: (x, {"entropy": x}), "mine: every loss reports entropy, use another name"),
    ],
)
def test_what_a_loss_may_return(tables, returned, sentence):
    @register_policy_loss("mine")
    def mine(log_probs, old_log_probs, advantages, mask, segment_ids):
        return returned(-log_probs)

    with pytest.raises(ValueError, match=sentence):
        rehearse(ActorLoss("mine"))


def test_a_loss_that_is_not_finite_says_so(tables):
    @register_policy_loss("mine")
    def mine(log_probs, old_log_probs, advantages, mask, segment_ids):
        return log_probs.sqrt(), {}

    with pytest.raises(NonFiniteError, match="token loss of mine is nan at token 0"):
        _ = ActorLoss("mine")(one_token(), {"log_probs": torch.tensor([-1.0])}).stats


def test_a_users_selection_has_knobs_and_travels_as_a_column(tables):
    def large(old_log_probs, advantages, mask, *, generator, threshold=1.0):
        return advantages.abs() > threshold

    @register_policy_loss("without_large", select=large, per_sequence=True, uses_ratio=False)
    def without_large(log_probs, old_log_probs, advantages, mask, segment_ids, *, selected, scale=1.0):
        return -scale * advantages * log_probs * (1 - selected), {}

    entry = algo.POLICY_LOSSES["without_large"]
    assert entry.per_sequence and not entry.uses_ratio
    for threshold, chosen in ((0.5, 1.0), (2.0, 0.0)):
        loss_fn = ActorLoss("without_large", args={"threshold": threshold, "scale": 2.0})
        step = step_columns(one_token(), loss=loss_fn, agg_mode="token-mean")
        assert step.columns["selected"].tolist() == [chosen]
        assert float(loss_fn(step, {"log_probs": torch.tensor([-3.0])}).loss) == 6.0 * (1 - chosen)


def test_a_selection_never_takes_a_masked_token(tables):
    @register_policy_loss("mine", select=lambda old_log_probs, advantages, mask, *, generator: torch.ones_like(mask))
    def mine(log_probs, old_log_probs, advantages, mask, segment_ids, *, selected):
        return -log_probs * selected, {}

    mask = torch.tensor([True, False])
    assert ActorLoss("mine").select(torch.zeros(2), torch.zeros(2), mask, torch.Generator()).tolist() == [True, False]


def test_a_selection_has_to_fit(tables):
    @register_policy_loss("numbers", select=lambda old_log_probs, advantages, mask, *, generator: advantages)
    def numbers(log_probs, old_log_probs, advantages, mask, segment_ids, *, selected):
        return -log_probs, {}

    @register_policy_loss("lonely")
    def lonely(log_probs, old_log_probs, advantages, mask, segment_ids, *, selected):
        return -log_probs, {}

    with pytest.raises(ValueError, match=r"numbers: its selection has shape \(2,\) and type torch.float32, expected"):
        rehearse(ActorLoss("numbers"))
    with pytest.raises(ValueError, match=r"lonely: it takes `selected`, expected register_policy_loss\(..., select="):
        rehearse(ActorLoss("lonely"))


LOSS_ORDER = "(log_probs, old_log_probs, advantages, mask, segment_ids), hyperparameters after *"
ESTIMATOR_ORDER = "(rewards, mask, segment_ids), what it asks for after *"
KL_ORDER = "(log_probs, ref_log_probs)"


@pytest.mark.parametrize(
    ("register", "function", "order"),
    [
        (register_policy_loss, lambda a, b: ..., LOSS_ORDER),
        (register_policy_loss, lambda old_log_probs, log_probs, advantages, mask, segment_ids: ..., LOSS_ORDER),
        (register_policy_loss, lambda log_probs, old_log_probs, advantages, mask, segment_ids, eps: ..., LOSS_ORDER),
        (register_policy_loss, lambda log_probs, old_log_probs, *columns: ..., LOSS_ORDER),
        (register_adv_est, lambda rewards, index: ..., ESTIMATOR_ORDER),
        (register_adv_est, lambda scores, response_mask, index: ..., ESTIMATOR_ORDER),
        (register_kl, lambda x: ..., KL_ORDER),
        (register_kl, lambda ref_log_probs, log_probs: ..., KL_ORDER),
        (register_kl, lambda *columns: ..., KL_ORDER),
    ],
)
def test_columns_count_by_name_and_in_order_not_by_number(tables, register, function, order):
    """Handed over by position, the wrong ones would be computed with: a gradient's sign, a mask for rewards."""
    takes = f" 'mine': it takes {inspect.signature(function)}; expected these columns"
    with pytest.raises(ValueError, match=f"{re.escape(takes)}.*: {re.escape(order)}$"):
        register("mine")(function)
    assert not any("mine" in table for table in (algo.POLICY_LOSSES, algo.ADV_ESTIMATORS, algo.KL_ESTIMATORS))


def test_the_columns_of_a_selection_count_by_name_too(tables):
    def loss(log_probs, old_log_probs, advantages, mask, segment_ids, *, selected, **hyperparameters):
        return -log_probs, {}

    with pytest.raises(
        ValueError, match=r"it takes \(advantages, old_log_probs, mask, \*, generator\); expected .*: \(old"
    ):
        register_policy_loss("mine", select=lambda advantages, old_log_probs, mask, *, generator: mask)(loss)
    assert "mine" not in algo.POLICY_LOSSES


def test_annotations_defaults_and_any_keywords_are_free(tables):
    def loss(
        log_probs: torch.Tensor, old_log_probs, advantages, mask, segment_ids=None, *, eps: float = 0.2, **others
    ) -> tuple:
        return -log_probs, {}

    register_policy_loss("mine")(loss)
    register_kl("mine")(lambda log_probs, ref_log_probs, /: log_probs - ref_log_probs)
    assert algo.POLICY_LOSSES["mine"].function is loss


def test_a_kl_that_gives_one_number_is_refused_before_the_run(tables):
    register_kl("mean")(lambda log_probs, ref_log_probs: (log_probs - ref_log_probs).mean())
    with pytest.raises(
        ValueError, match=r"KL estimator mean: it returns shape \(\), expected one number a token, \(2,\)"
    ):
        rehearse(ActorLoss(use_kl_loss=True, kl_loss_type="mean"))


def test_an_estimator_that_gives_one_number_a_sample_is_refused(tables):
    @register_adv_est("per_sample")
    def per_sample(rewards, mask, segment_ids):
        return rewards.sum(), rewards

    with pytest.raises(ValueError, match=r"adv_estimator=per_sample: advantages need one number a token, \(1,\)"):
        estimate(one_token(), adv_estimator="per_sample")


def test_names_are_taken_once(tables):
    with pytest.raises(ValueError, match="policy loss 'ppo' exists already"):
        register_policy_loss("ppo")(lambda log_probs, old_log_probs, advantages, mask, segment_ids: (log_probs, {}))
    with pytest.raises(ValueError, match="KL estimator 'full' exists already"):
        register_kl("full")
    with pytest.raises(ValueError, match='without "[+]"'):
        register_kl("mine+")


def test_plugins_that_are_not_there_and_plugins_that_fail(tables, tmp_path):
    with pytest.raises(ValueError, match="algorithm.plugins has 'nowhere.py': no such file"):
        load_plugins(["nowhere.py"])
    with pytest.raises(ValueError, match="algorithm.plugins has 'no_such_module': no such module"):
        load_plugins(["no_such_module"])
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"broken.py', which fails: ZeroDivisionError: division by zero \("):
            load_plugins([str(broken)])
    load_plugins(["math"])


def test_the_room_is_light():
    heavy = "megatron transformers hydra omegaconf rich wandb matplotlib"
    code = f"import sys, megarl.algo; print([m for m in {heavy.split()} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
