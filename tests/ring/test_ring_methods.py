"""What the loss layer asks of the ring, through the whole of it: more columns, more completions, more rewards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from config_helpers import tables_kept
from ring_cases import make_parts, settings, steps

from megarl import train
from megarl.batch import Batch, Stats
from megarl.cli import main

pytestmark = pytest.mark.dist
ALONE = ["trainer.n_gpus_per_node=1", "trainer.total_training_steps=2", "actor.ppo_mini_batch_size=2"]

MINE = """
import torch
from megarl.algo import register_adv_est, register_policy_loss
from megarl.rewards import register_reward

@register_policy_loss("squared")
def squared(log_probs, old_log_probs, advantages, mask, segment_ids, *, strength=1.0):
    return strength * 0.5 * (log_probs - old_log_probs - advantages) ** 2, {"distance": abs(log_probs - old_log_probs)}

@register_adv_est("centred")
def centred(rewards, mask, segment_ids, *, group_ids, scale=1.0):
    scores = torch.zeros(len(group_ids)).index_add(0, segment_ids, rewards)
    column = scale * (scores - scores.mean())[segment_ids] * mask
    return column, column

@register_policy_loss("broken")
def broken(log_probs, old_log_probs, advantages, mask, segment_ids):
    return torch.where(advantages == advantages.max(), float("nan"), log_probs), {}

@register_reward("several")
def several(prompt, completion):
    small = sum(token % 2 for token in completion.token_ids) / 6
    return {"score": sum(map(str.isdigit, completion.text)) / 6, "odd": small}

@register_reward("long")
def long(prompt, completion):
    return (len(completion.token_ids) + sum(map(str.isdigit, completion.text))) / 6
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = make_parts(tmp_path_factory.mktemp("parts"))
    (folder / "mine.py").write_text(MINE)
    with tables_kept():
        yield folder


def plugins(parts: Path, reward: str = "several") -> list[str]:
    return [f"algorithm.plugins=[{parts}/mine.py]", f"reward.fn={reward}"]


@pytest.fixture
def estimated(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batch of every iteration, with its advantages."""
    batches: list[Batch] = []
    estimate = train.estimate

    def recorded(*args: Any, **more: Any) -> tuple[Batch, Stats]:
        batch, stats = estimate(*args, **more)
        batches.append(batch)
        return batch, stats

    monkeypatch.setattr(train, "estimate", recorded)
    return batches


@pytest.mark.long
def test_remax_full_kl_correction_and_dynamic_sampling_together(
    parts: Path, tmp_path: Path, estimated: list[Batch]
) -> None:
    """Greedy completions, the exact KL in loss and reward, groups that are refilled, weights and rejection."""
    correction = "algorithm.rollout_correction"
    more = [
        *plugins(parts, "long"),  # of which a greedy completion earns some, whatever it says
        "algorithm.adv_estimator=remax",
        "algorithm.policy_loss_fn=clip_cov",
        "algorithm.policy_loss_args.clip_cov_lb=-100",
        "actor.use_kl_loss=true",
        "actor.kl_loss_type=full",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_penalty=full",
        f"{correction}.level=token",
        f"{correction}.normalize=true",
        f"{correction}.reject_by=ratio",
        f"{correction}.reject_high=1.0000001",  # what float32's last bit decides: some tokens, not all
        "algorithm.filter_groups.enable=true",
        "algorithm.overlong_buffer.enable=true",
        "algorithm.overlong_buffer.len=2",
        "actor.megatron.tensor_model_parallel_size=2",
        "actor.ppo_mini_batch_size=2",
        "trainer.test_freq=-1",
        "trainer.total_training_steps=2",
    ]
    assert main(["train", *settings(parts, tmp_path, "remax", *more)]) == 0
    run = tmp_path / "remax"
    kl = steps(run, "actor/reward_kl_penalty")
    assert abs(kl[1]) < 1e-7 < kl[2], "the reference is the policy at the start, and exact KL is never below 0"
    assert all(kl > 0 for kl in steps(run, "actor/kl_loss").values()), "after the first mini-batch they differ"
    assert all(0 < share < 1 for share in steps(run, "rollout_corr/share_rejected").values())
    assert max(steps(run, "actor/cov_selected").values()) > 0
    overlong = steps(run, "reward/overlong_share").values()
    assert all(share > 0.5 for share in overlong), "an untrained model nearly always writes to the limit"
    assert set(steps(run, "actor/skipped_steps").values()) == {0.0}
    assert min(steps(run, "rollout/gen_batches").values()) >= 1
    for step, dropped in steps(run, "rollout/dropped_share").items():
        assert (dropped > 0) == (steps(run, "rollout/gen_batches")[step] > 1)
    returns, advantages = steps(run, "critic/returns/mean"), steps(run, "critic/advantages/mean")
    for step, batch in enumerate(estimated, 1):
        greedy = batch.per_sequence["greedy_score"]
        assert greedy.min() >= 1 / 6, "at least one token"
        per_prompt = [greedy[batch.per_sequence["group"] == group].unique().tolist() for group in range(4)]
        assert [len(scores) for scores in per_prompt] == [1] * 4, "the same for every sample of a prompt"
        of_tokens = greedy[batch.segment_ids][batch.columns["response_mask"] != 0]
        assert returns[step] - advantages[step] == pytest.approx(float(of_tokens.mean()), abs=1e-5)
    assert len(estimated) == 2


@pytest.mark.long
def test_gdpo_compares_several_rewards_against_the_servers_policy(parts: Path, tmp_path: Path) -> None:
    """Rewards of a plug-in, one iteration ahead; bypass with rejection; groups that are alike are left out."""
    correction = "algorithm.rollout_correction"
    more = [
        *ALONE,
        *plugins(parts),
        "algorithm.adv_estimator=gdpo",
        "algorithm.reward_weights={reward:1,odd:0.5}",
        f"{correction}.bypass=true",
        f"{correction}.reject_by=k1",
        f"{correction}.reject_level=sequence",
        f"{correction}.reject_low=-10",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=odd",
        "algorithm.filter_groups.refill=false",
        "rollout.ahead=1",
    ]
    assert main(["train", *settings(parts, tmp_path, "gdpo", *more)]) == 0
    run = tmp_path / "gdpo"
    assert all(grad > 0 for grad in steps(run, "actor/grad_norm").values())
    assert steps(run, "rollout_corr/share_rejected") == {1: 0.0, 2: 0.0}
    assert set(steps(run, "rollout/gen_batches").values()) == {1.0}
    gaps = steps(run, "rollout_corr/kl")
    for step, first in steps(run, "actor/first_ppo_kl").items():
        assert abs(first) < 1e-6 + 3 * steps(run, "rollout_corr/log_prob_gap_mean")[step], gaps


@pytest.mark.slow
def test_a_users_loss_estimator_and_reward_are_a_file(parts: Path, tmp_path: Path) -> None:
    more = [
        *ALONE,
        *plugins(parts),
        "algorithm.policy_loss_fn=squared",
        "algorithm.policy_loss_args.strength=2",
        "algorithm.adv_estimator=centred",
        "algorithm.adv_estimator_args.scale=0.5",
    ]
    assert main(["train", *settings(parts, tmp_path, "mine", *more)]) == 0
    run = tmp_path / "mine"
    assert all(loss > 0 for loss in steps(run, "actor/pg_loss").values())
    assert all(distance > 0 for distance in steps(run, "actor/distance").values())
    assert not steps(run, "critic/vf_loss"), "it asks for no values, so there is no critic"
    for step, largest in steps(run, "critic/advantages/max").items():
        spread = steps(run, "critic/score/max")[step] - steps(run, "critic/score/mean")[step]
        assert largest == pytest.approx(0.5 * spread, abs=1e-6)


@pytest.mark.slow
def test_the_documents_loss_and_estimator_run_as_they_are_printed(parts: Path, tmp_path: Path) -> None:
    for name in ("policy_loss", "estimator"):
        printed = Path(__file__).parents[1] / "fixtures/source_documents" / f"{name}_function.txt"
        (tmp_path / f"my_{name}.py").write_text(printed.read_text())
    more = [
        *ALONE,
        f"algorithm.plugins=[{tmp_path}/my_policy_loss.py,{tmp_path}/my_estimator.py]",
        "algorithm.policy_loss_fn=my_ppo_variant",
        "algorithm.adv_estimator=my_advantage",
        "algorithm.lam=0.95",
    ]
    assert main(["train", *settings(parts, tmp_path, "printed", *more)]) == 0
    run = tmp_path / "printed"
    assert len(steps(run, "actor/my_ppo_variant/policy_loss")) == len(steps(run, "critic/vf_loss")) == 2
    assert all(grad > 0 for grad in steps(run, "actor/grad_norm").values())


@pytest.mark.long
def test_an_optimal_token_baseline_and_a_straight_through_full_kl(
    parts: Path, tmp_path: Path, estimated: list[Batch]
) -> None:
    more = [
        *ALONE,
        "algorithm.adv_estimator=optimal_token_baseline",
        "algorithm.policy_loss_fn=gspo",
        "actor.loss_agg_mode=seq-mean-token-mean",
        "actor.use_kl_loss=true",
        "actor.kl_loss_type=full+",
        "actor.kl_loss_coef=0.5",
    ]
    assert main(["train", *settings(parts, tmp_path, "token", *more)]) == 0
    run = tmp_path / "token"
    assert all(grad > 0 for grad in steps(run, "actor/grad_norm").values())
    assert all(kl > 0 for kl in steps(run, "actor/kl_loss").values())
    assert len(estimated) == 2
    for batch in estimated:
        check_token_baselines(batch)


def check_token_baselines(batch: Batch) -> None:
    """With gamma=1 a return is the same all along a sample; what is taken off it, by the weights, is not."""
    columns = {name: batch.split(column.double()) for name, column in batch.columns.items()}
    masks = [mask != 0 for mask in columns["response_mask"]]

    def live(name: str) -> list[torch.Tensor]:
        return [column[mask] for column, mask in zip(columns[name], masks, strict=True)]

    squares, chosen = live("sum_pi_squared"), [log_probs.exp() for log_probs in live("old_log_probs")]
    assert all(((s >= p**2 - 1e-6) & (s < 1)).all() for s, p in zip(squares, chosen, strict=True))
    weights = [(1 - 2 * p + s).cumsum(0) for p, s in zip(chosen, squares, strict=True)]
    returns, advantages = live("returns"), live("advantages")
    assert all((score == G).all() for G, score in zip(returns, batch.per_sequence["score"].double(), strict=True))
    assert any(A.max() - A.min() > 1e-4 for A in advantages)
    for group in batch.per_sequence["group"].unique():
        members = [i for i, of in enumerate(batch.per_sequence["group"]) if of == group]
        for t in range(max(len(returns[i]) for i in members)):
            reach = [i for i in members if len(returns[i]) > t]
            total = sum(float(weights[i][t]) for i in reach)
            taken = sum(float(returns[i][t] * weights[i][t]) for i in reach) / total if len(reach) > 1 else 0.0
            for i in reach:
                assert float(advantages[i][t]) == pytest.approx(float(returns[i][t]) - taken, abs=1e-5)


@pytest.mark.slow
def test_a_number_that_is_not_finite_stops_the_run_with_the_name_of_its_sample(
    parts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more = [*ALONE, *plugins(parts), "algorithm.policy_loss_fn=broken", "algorithm.adv_estimator=grpo"]
    assert main(["train", *settings(parts, tmp_path, "broken", *more)]) == 1
    said = capfd.readouterr().err
    assert "the run stopped: token loss of broken is nan at token 6 of sample 0-" in said, "the first after the prompt"
    report = (tmp_path / "broken" / "logs" / "failure.txt").read_text()
    assert "Traceback" in report and "token loss of broken is nan at token 6 of sample 0-" in report


@pytest.mark.slow
def test_a_run_whose_roles_are_offloaded_ends_with_the_same_weights(parts: Path, tmp_path: Path) -> None:
    """Critic, actor and reference, two epochs of two optimizer steps each; to the bit."""
    offload = [f"{role}.megatron.param_offload=true" for role in ("actor", "critic", "ref")]
    offload += [f"{role}.megatron.optimizer_offload=true" for role in ("actor", "critic")]
    ppo = ["algorithm.adv_estimator=gae", "actor.use_kl_loss=true", "actor.ppo_epochs=2", "actor.ppo_mini_batch_size=2"]
    ends = []
    for name, more in (("plain", []), ("offloaded", offload)):
        words = ["trainer.total_training_steps=2", "trainer.test_freq=-1", *ppo, *more]
        assert main(["train", *settings(parts, tmp_path, name, *plugins(parts), *words)]) == 0
        ends.append((tmp_path / name / "hf" / "model.safetensors").read_bytes())
    assert ends[0] == ends[1]
