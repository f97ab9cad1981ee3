import subprocess
import sys

import pytest
import torch

from megarl import algo
from megarl.algo import (
    ActorLoss,
    estimate,
    kl_estimate,
    load_plugins,
    register_adv_est,
    register_kl,
    register_policy_loss,
)
from megarl.algo.registry import keyword_names
from megarl.sample import Batch

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


@pytest.fixture
def tables():
    """What a test registers is gone afterwards."""
    kept = [(table, dict(table)) for table in (algo.POLICY_LOSSES, algo.KL_ESTIMATORS, algo.ADV_ESTIMATORS)]
    yield
    for table, before in kept:
        table.clear()
        table.update(before)


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
        ActorLoss("asymmetric", clip_low=0.1)


def test_a_loss_that_aggregates_is_refused_before_the_run(tables):
    @register_policy_loss("scalar")
    def scalar(log_probs, old_log_probs, advantages, mask, segment_ids):
        return (log_probs * advantages).mean(), {}

    with pytest.raises(ValueError, match=r"policy loss scalar: its token loss has shape \(\), want one number a token"):
        ActorLoss("scalar")


def test_an_estimator_that_gives_one_number_a_sample_is_refused(tables):
    @register_adv_est("per_sample")
    def per_sample(rewards, mask, segment_ids):
        return rewards.sum(), rewards

    with pytest.raises(ValueError, match=r"adv_estimator=per_sample: advantages want one number a token, \(1,\)"):
        estimate(one_token(), adv_estimator="per_sample")


def test_names_are_taken_once(tables):
    with pytest.raises(ValueError, match="policy loss 'ppo' exists already"):
        register_policy_loss("ppo")(lambda *columns: columns)
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
        with pytest.raises(ZeroDivisionError):
            load_plugins([str(broken)])
    load_plugins(["math"])


def test_keyword_names_tells_what_has_a_default():
    assert keyword_names(lambda a, b=1, *, c, d=2: None) == {"c": False, "d": True}


def test_the_room_is_light():
    heavy = "megatron transformers hydra omegaconf rich wandb matplotlib"
    code = f"import sys, megarl.algo; print([m for m in {heavy.split()} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
