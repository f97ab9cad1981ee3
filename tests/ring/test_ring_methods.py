"""What losses, estimators, rewards and sampling ask of the ring, through the whole of it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from config_helpers import tables_kept
from ring_cases import PPO, lines, make_parts, steps
from tiny_server import make_reward_model
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from megarl.trainer import roles

pytestmark = [pytest.mark.dist, pytest.mark.full]
ALONE = "trainer.n_gpus_per_node=1 trainer.total_training_steps=2 actor.ppo_mini_batch_size=2"
Trained = Callable[..., Path]

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

@register_reward("long")
def long(prompt, completion):
    return (len(completion.token_ids) + sum(map(str.isdigit, completion.text))) / 6
"""
REWARDS = """
def picky(prompt, completion):
    if not prompt.uid.startswith("eval") and sum(completion.token_ids) % 3 == 0:
        raise KeyError("no such unit")
    return sum(map(str.isdigit, completion.text)) / 6

async def asked(prompt, completion):
    return {"score": 1.0, "length": len(completion.token_ids)}
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = make_parts(tmp_path_factory.mktemp("parts"))
    (folder / "mine.py").write_text(MINE)
    (folder / "rewards.py").write_text(REWARDS)
    with tables_kept():
        yield folder


@pytest.fixture
def plugins(parts: Path) -> str:
    return f"algorithm.plugins=[{parts}/mine.py] reward.fn=long"


def test_remax_full_kl_correction_and_dynamic_sampling_together(trained: Trained, plugins: str) -> None:
    """Greedy completions, the exact KL in loss and reward, groups that are refilled, weights and rejection.

    A greedy completion earns some of the reward, whatever it says; float32's last bit decides of which tokens the
    ratio is above the bound of the rejection: of some, not of all.
    """
    run = trained(
        "remax",
        f"""{plugins} {ALONE} trainer.n_gpus_per_node=2 actor.megatron.tensor_model_parallel_size=2
        algorithm.adv_estimator=remax algorithm.policy_loss_fn=clip_cov algorithm.policy_loss_args.clip_cov_lb=-100
        actor.use_kl_loss=true actor.kl_loss_type=full algorithm.use_kl_in_reward=true algorithm.kl_penalty=full
        algorithm.rollout_correction.level=token algorithm.rollout_correction.normalize=true
        algorithm.rollout_correction.reject_by=ratio algorithm.rollout_correction.reject_high=1.0000001
        algorithm.filter_groups.enable=true algorithm.overlong_buffer.enable=true algorithm.overlong_buffer.len=2
        trainer.test_freq=-1""",
    )
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
    for step, mean in returns.items():
        assert mean - advantages[step] >= 1 / 6, "a greedy completion has at least one token"


def test_a_users_loss_estimator_and_reward_are_a_file(trained: Trained, plugins: str) -> None:
    run = trained(
        "mine",
        f"""{plugins} {ALONE} algorithm.policy_loss_fn=squared algorithm.policy_loss_args.strength=2
        algorithm.adv_estimator=centred algorithm.adv_estimator_args.scale=0.5""",
    )
    assert all(loss > 0 for loss in steps(run, "actor/pg_loss").values())
    assert all(distance > 0 for distance in steps(run, "actor/distance").values())
    assert not steps(run, "critic/vf_loss"), "it asks for no values, so there is no critic"
    for step, largest in steps(run, "critic/advantages/max").items():
        spread = steps(run, "critic/score/max")[step] - steps(run, "critic/score/mean")[step]
        assert largest == pytest.approx(0.5 * spread, abs=1e-6)


def test_the_documents_loss_and_estimator_run_as_they_are_printed(trained: Trained, tmp_path: Path) -> None:
    for name in ("policy_loss", "estimator"):
        printed = Path(__file__).parents[1] / "fixtures/source_documents" / f"{name}_function.txt"
        (tmp_path / f"my_{name}.py").write_text(printed.read_text())
    run = trained(
        "printed",
        f"""{ALONE} algorithm.plugins=[{tmp_path}/my_policy_loss.py,{tmp_path}/my_estimator.py] algorithm.lam=0.95
        algorithm.policy_loss_fn=my_ppo_variant algorithm.adv_estimator=my_advantage
        actor.strategy=none critic.strategy=none""",
    )
    assert len(steps(run, "actor/my_ppo_variant/policy_loss")) == len(steps(run, "critic/vf_loss")) == 2
    assert all(grad > 0 for grad in steps(run, "actor/grad_norm").values())


def test_several_rewards_train_together_by_gdpo_and_what_none_could_score_is_left_out(
    parts: Path, trained: Trained, tmp_path: Path
) -> None:
    """A function that fails at times, an async one, and a reward model of its own."""
    run = trained(
        "several",
        f"""{ALONE} algorithm.adv_estimator=gdpo algorithm.reward_weights={{picky:1,asked/length:0.5}}
        reward.fn=[{parts}/rewards.py:picky,{parts}/rewards.py:asked,model] reward.weights={{asked:0.5,model:0.1}}
        reward.try_rows=0 reward.model.path={make_reward_model(tmp_path / "judge", seed=3)}""",
    )
    unscored = steps(run, "reward/unscored")
    assert set(steps(run, "rollout/lost").values()) == {0.0}, "the servers generated all of it"
    samples, visits = lines(run / "samples.jsonl"), lines(run / "visits.jsonl")
    assert sum(unscored.values()) > 0
    assert sum(len(row["trained"]) + len(row["lost"]) for row in visits) == 2 * 4
    assert 2 * 4 * 4 - sum(unscored.values()) >= len(samples) > 0
    for sample in samples:
        extra = sample["reward_extra"]
        assert extra["asked/length"] == sample["num_tokens"]
        assert sample["reward"] == pytest.approx(extra["picky"] + 0.5 + 0.1 * extra["model"])
    assert len({sample["reward_extra"]["model"] for sample in samples}) > 1
    assert set(steps(run, "reward/asked").values()) == {1.0}
    assert all(grad > 0 for grad in steps(run, "actor/grad_norm").values())
    assert (run / "logs" / "reward_model" / "server_0.log").exists()


def make_judge(policy: Path, folder: Path) -> Path:
    """A classifier of the policy's shape and tokens, whose weights are large enough for scores to differ."""
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(policy, num_labels=1, initializer_range=0.3)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    return folder


@torch.inference_mode()
def transformers_scores(judge: Path, samples: list[dict[str, Any]]) -> list[float | None]:
    """None for a completion whose text has not all of its tokens: special ones in the middle."""
    tokenizer = AutoTokenizer.from_pretrained(judge)
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32).eval()
    scores: list[float | None] = []
    for sample in samples:
        prompt, written = (tokenizer(sample[name])["input_ids"] for name in ("prompt", "completion"))
        written += [tokenizer.eos_token_id] * (sample["finish_reason"] == "stop")
        is_whole = len(written) == sample["num_tokens"]
        scores.append(float(model(torch.tensor([prompt + written])).logits) if is_whole else None)
    return scores


def test_a_reward_model_scores_on_the_ranks_of_the_run(parts: Path, trained: Trained, tmp_path: Path) -> None:
    """Over two pipeline stages, beside another reward; the run starts no server of it."""
    judge = make_judge(parts / "model", tmp_path / "judge")
    run = trained(
        "on_ranks",
        f"""algorithm.adv_estimator=grpo actor.megatron.pipeline_model_parallel_size=2 trainer.total_training_steps=2
        actor.ppo_max_token_len_per_gpu=40 reward.fn=[{parts}/digits.py:share_of_digits,model]
        reward.weights={{model:0.1}} reward.model.engine=megatron reward.model.path={judge}""",
    )
    samples = lines(run / "samples.jsonl")
    for sample in samples:
        extra = sample["reward_extra"]
        assert sample["reward"] == pytest.approx(extra["share_of_digits"] + 0.1 * extra["model"])
    pairs = zip(samples, transformers_scores(judge, samples), strict=True)
    compared = [(sample["reward_extra"]["model"], score) for sample, score in pairs if score is not None]
    assert len({score for score, _ in compared}) > 4
    # Scores of size 1, and sums of some ten numbers of float32 in another order.
    assert [ours for ours, _ in compared] == pytest.approx([theirs for _, theirs in compared], abs=1e-5, rel=1e-5)
    by_step = steps(run, "reward/model")
    assert by_step.keys() == {1, 2}
    for step, mean in by_step.items():
        scores = [sample["reward_extra"]["model"] for sample in samples if sample["step"] == step]
        assert mean == pytest.approx(sum(scores) / len(scores))
    assert all(grad > 0 for grad in steps(run, "actor/grad_norm").values())
    assert not steps(run, "critic/vf_loss"), "grpo needs no critic"
    assert not (run / "logs" / "reward_model").exists()


def test_with_top_p_and_top_k_the_gap_is_that_of_a_run_that_samples_from_everything_and_large_without_the_replay(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two tensor-parallel ranks, with a reference and a critic, in pieces of two tokens.

    Then the same run, whose ranks are not told what could be drawn: they take the softmax of all.
    """
    narrow, gap = "rollout.engine=hf rollout.top_p=0.6 rollout.top_k=20", "rollout_corr/log_prob_gap_max"
    run = trained("narrow", *PPO, narrow, "rollout.piece_tokens=2 algorithm.use_kl_in_reward=true")
    gaps = steps(run, gap)
    assert len(gaps) == 3 and 0 < max(gaps.values()) < 1e-4
    assert max(abs(kl) for kl in steps(run, "actor/first_ppo_kl").values()) < 1e-8
    assert abs(steps(run, "actor/reward_kl_penalty")[1]) < 1e-8, "the reference has not moved at the first step either"
    monkeypatch.setattr(roles, "names_in_batch", lambda name: ())  # noqa: ARG005
    blind = trained("blind", *PPO, narrow, "trainer.total_training_steps=1")
    assert steps(blind, gap)[1] > 0.3, "the logarithm of the mass that the server kept"
    first = [[s["completion"] for s in lines(r / "samples.jsonl") if s["step"] == 1] for r in (run, blind)]
    assert first[0] == first[1]
