"""Losses and estimators with the parameters of verl's own source run unchanged from a plug-in's file."""

from pathlib import Path

import pytest
import torch
from algo_reference import random_packed
from config_helpers import tables_kept

from megarl import algo
from megarl.algo import ActorLoss, load_plugins, step_columns
from megarl.algo.hyperparameters import keyword_names
from megarl.algo.loss import POLICY_LOSSES
from megarl.algo.rehearsal import rehearse
from megarl.algo.segments import clean

LENGTHS = [5, 4, 9, 3, 7, 2]
IMPORTS = """
from typing import Any, Optional

import torch
from omegaconf import DictConfig
import verl.utils.torch_functional as verl_F
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.workers.config import ActorConfig
"""
SIGNATURE = """(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Optional[DictConfig | ActorConfig] = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    assert config is not None
    assert not isinstance(config, AlgoConfig), "passing AlgoConfig not supported yet"
    assert isinstance(config, ActorConfig)
    both = (config.clip_ratio_low, config.clip_ratio_high)
    low, high = (config.clip_ratio if side is None else side for side in both)
    gap = torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0)
    kl = verl_F.masked_mean(-gap, response_mask)
"""
METRICS = """
    clipfrac = verl_F.masked_mean((clipped > plain).float(), response_mask)
    return loss, {"actor/pg_clipfrac": clipfrac.detach().item(), "actor/ppo_kl": kl.detach().item()}
"""
END = f"""
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(
        loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
    )
{METRICS}"""
LOSS = f"""{IMPORTS}

@register_policy_loss("clipped_twice")
def clipped_twice{SIGNATURE}
    c = config.get("clip_ratio_c", 3.0)
    assert c > 1.0
    ratio = gap.exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    losses = torch.maximum(plain, clipped)
    losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * c), losses)
{END}"""
# The last gives one number for a sequence, whatever loss_agg_mode is.
FURTHER = f"""{IMPORTS}

@register_policy_loss("soft_of_mine")
def soft_of_mine{SIGNATURE}
    plain = clipped = gap.exp() - 1
    tau = torch.where(advantages > 0, config.tau_pos, config.tau_neg)
    losses = -advantages * torch.sigmoid(tau * plain) * (4.0 / tau)
{END}
@register_policy_loss("geo_mean_of_mine")
def geo_mean_of_mine{SIGNATURE}
    count = response_mask.sum(dim=-1)
    advantage = (advantages * response_mask).sum(dim=-1) / (count + 1e-8)
    sign = advantage.sign().unsqueeze(-1)
    kept = sign * torch.min(sign * gap, sign * gap.clamp(-low, high))
    losses = -advantage * torch.exp((kept * response_mask).sum(dim=-1) / (count + 1e-8))
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights.mean(dim=-1)
    loss, plain, clipped = losses.mean(), kept, gap
{METRICS}"""
# It reads what verl's losses by covariance have in config.policy_loss.
OF_THE_BATCH = f"""{IMPORTS}
@register_policy_loss("covariance_of_mine")
def covariance_of_mine{SIGNATURE}
    how = config.policy_loss
    ratio = gap.exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    with torch.no_grad():
        means = [verl_F.masked_mean(each, response_mask) for each in (advantages, log_prob)]
        cov = (advantages - means[0]) * (log_prob - means[1])
        inside = (cov > how.clip_cov_lb) & (cov < how.clip_cov_ub) & (response_mask > 0)
        number = max(1, int(max(how.kl_cov_ratio, how.clip_cov_ratio) * response_mask.sum().item()))
        chosen = torch.topk(cov.masked_fill(~inside, -torch.inf).flatten(), number).indices
        pulled = torch.zeros_like(cov).flatten().index_fill(0, chosen, 1.0).view_as(cov)
    losses = torch.maximum(plain, clipped) * (1 - pulled) + how.ppo_kl_coef * gap.abs() * pulled
{END}"""
ESTIMATORS = """
from collections import defaultdict

import numpy as np
import torch
import verl.utils.torch_functional as F
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import AdvantageEstimator, register_adv_est
from verl.utils import as_torch_index, group_mean_std


@register_adv_est("groups_of_mine")
def groups_of_mine(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgoConfig | None = None,
):
    assert isinstance(config, AlgoConfig)
    scores = token_level_rewards.sum(dim=-1)
    found = defaultdict(list)
    for row, prompt in enumerate(index):
        found[prompt].append(scores[row])
    out = []
    for row, prompt in enumerate(index):
        group = torch.stack(found[prompt])
        out.append((scores[row] - group.mean()) / (group.std() + epsilon) if len(group) > 1 else scores[row])
    advantages = torch.stack(out).unsqueeze(-1) * response_mask
    return advantages, advantages


@register_adv_est(AdvantageEstimator.GRPO_VECTORIZED)
def groups_at_once(token_level_rewards, response_mask, index, epsilon=1e-6, norm_adv_by_std_in_grpo=True, **kwargs):
    scores = token_level_rewards.sum(dim=-1)
    groups = as_torch_index(index, device=scores.device)
    mean, std, _ = group_mean_std(scores, groups, eps=epsilon, device=scores.device)
    centred = scores - mean[groups]
    if norm_adv_by_std_in_grpo:
        centred = centred / (std[groups] + epsilon)
    advantages = centred.unsqueeze(-1) * response_mask
    return advantages, advantages


@register_adv_est("returns_of_mine")
def returns_of_mine(token_level_rewards, response_mask, config=None, **kwargs):
    returns, running = torch.zeros_like(token_level_rewards), 0
    for t in reversed(range(token_level_rewards.shape[1])):
        running = token_level_rewards[:, t] + config.gamma * running
        returns[:, t] = running
        running = running * response_mask[:, t]
    return F.masked_whiten(returns, response_mask) * response_mask, returns
"""


@pytest.fixture(scope="module", autouse=True)
def mine(tmp_path_factory):
    """The files, loaded; what they register is gone afterwards."""
    folder = tmp_path_factory.mktemp("mine")
    with tables_kept():
        for name, text in (("loss", LOSS), ("further", FURTHER), ("estimators", ESTIMATORS)):
            (folder / f"{name}.py").write_text(text)
            load_plugins([str(folder / f"{name}.py")])
        yield


OURS_AND_THEIRS = [
    ("ppo", "clipped_twice", "token-mean", {}, 1e-12),
    ("ppo", "clipped_twice", "seq-mean-token-mean", {"clip_low": 0.1, "clip_high": 0.3, "clip_c": 2.0}, 1e-12),
    ("sapo", "soft_of_mine", "token-mean", {}, 1e-6),  # verl's defaults; tau is float32
    ("gmpo", "geo_mean_of_mine", "seq-mean-token-mean", {"clip_low": 0.2, "clip_high": 0.3}, 1e-7),
]


@pytest.mark.parametrize(("ours", "theirs", "mode", "clips", "rel"), OURS_AND_THEIRS)
def test_a_loss_in_verls_form_is_ours_however_a_step_is_split(ours, theirs, mode, clips, rel):
    """Value and gradient of a whole step by our loss, and of the step in three parts by theirs."""
    batch = random_packed(LENGTHS, 1).batch
    step = step_columns(batch, loss=ActorLoss(), agg_mode=mode)
    values = []
    for name in (ours, theirs):
        total, slopes = 0.0, []
        for indices in ([[0, 1, 2, 3, 4, 5]], [[0], [1, 2, 3], [4, 5]])[name == theirs]:
            micro = step.select(indices)
            log_probs = micro.columns["log_probs"].clone().requires_grad_()
            out = ActorLoss(name, **clips)(micro, {"log_probs": log_probs})
            total += out.loss.item()
            slopes.append(torch.autograd.grad(out.loss, log_probs)[0])
        values.append((total, torch.cat(slopes)))
    (value, slopes), (their_value, their_slopes) = values
    assert their_value == pytest.approx(value, rel=rel)
    assert torch.allclose(slopes, their_slopes, rtol=100 * rel, atol=1e-14)


def test_a_loss_that_honours_both_modes_takes_every_mode_and_names_its_statistics_once():
    loss = ActorLoss("clipped_twice")
    rehearse(loss)
    loss.require_agg_mode("seq-mean-token-sum-norm")  # raises for a mode that the loss cannot have
    assert POLICY_LOSSES["clipped_twice"].function.agg_modes is None, "None: all modes"
    step = step_columns(random_packed(LENGTHS, 1).batch, loss=loss, agg_mode="token-mean")
    stats = loss(step, {"log_probs": step.columns["log_probs"]}).stats
    assert {"actor/clipped_twice/pg_clipfrac", "actor/clipped_twice/ppo_kl"} <= stats.keys()


def batch_of(seed):
    packed = random_packed(LENGTHS, seed).batch
    mask = packed.columns["response_mask"] != 0
    rewards = clean(packed.columns["advantages"], mask)
    return packed, mask, rewards


@pytest.mark.parametrize("name", ["groups_of_mine", "grpo_vectorized"])
@pytest.mark.parametrize("seed", range(2))
def test_a_group_estimator_in_verls_form_is_grpo(name, seed):
    packed, mask, rewards = batch_of(seed)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    how = {"group_ids": groups, "norm_adv_by_std_in_grpo": True}
    theirs, _ = algo.ADV_ESTIMATORS[name](rewards, mask, packed.segment_ids, **how)
    ours, _ = algo.ADV_ESTIMATORS["grpo"](rewards, mask, packed.segment_ids, **how)
    assert torch.allclose(theirs.double(), ours.double(), atol=1e-5)  # theirs has the dtype of the rewards


def test_an_estimator_that_reads_config_is_reinforce_plus_plus():
    packed, mask, rewards = batch_of(4)
    theirs, _ = algo.ADV_ESTIMATORS["returns_of_mine"](
        rewards, mask, packed.segment_ids, gamma=0.9, lam=1.0, norm_adv_by_std_in_grpo=True
    )
    ours, _ = algo.ADV_ESTIMATORS["reinforce_plus_plus"](rewards, mask, packed.segment_ids, gamma=0.9)
    assert torch.allclose(theirs, ours, atol=1e-6)


def test_they_ask_for_what_the_driver_has():
    assert keyword_names(algo.ADV_ESTIMATORS["groups_of_mine"]) == {
        **{"group_ids": False, "norm_adv_by_std_in_grpo": False, "gamma": False, "lam": False}
    }


def load_more(folder: Path, text: str) -> None:
    (folder / "more.py").write_text(text)
    load_plugins([str(folder / "more.py")])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("from verl.trainer.ppo.core_algos import compute_gae", "cannot import name 'compute_gae'"),
        ("import verl.workers.rollout", "No module named 'verl.workers.rollout'"),
        (LOSS.replace("clipped_twice", "other").replace("advantages: t", "teacher: int, advantages: t"), "teacher"),
    ],
)
def test_what_verl_has_and_a_plug_in_does_not_is_one_sentence(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^algorithm.plugins has .*{told}.*$"):
        load_more(tmp_path, text)


@pytest.mark.parametrize(
    ("name", "old", "new", "how", "sentence"),
    [
        ("summed", "loss_agg_mode=loss_agg_mode", "loss_agg_mode='x'", {}, "loss_agg_mode='x': expected the mode"),
        ("unclipped", "config.clip_ratio_low", "0.2", {"clip_low": 0.1},
         "actor.clip_ratio_low=0.1: .* does not read config.clip_ratio_low"),
    ],
)  # fmt: skip
def test_a_loss_that_sums_and_a_clip_that_a_loss_does_not_read_are_refused(
    name: str, old: str, new: str, how: dict[str, float], sentence: str, tmp_path: Path
) -> None:
    load_more(tmp_path, LOSS.replace("clipped_twice", name).replace(old, new))
    with pytest.raises(ValueError, match=sentence):
        rehearse(ActorLoss(name, **how))


def test_a_loss_that_chooses_tokens_of_a_batch_is_refused_for_that_reason_alone(tmp_path: Path) -> None:
    """Ours chooses them in the whole step: clip_cov, kl_cov."""
    load_more(tmp_path, OF_THE_BATCH)
    with pytest.raises(ValueError, match="so it would change with the micro-batch"):
        rehearse(ActorLoss("covariance_of_mine"))
