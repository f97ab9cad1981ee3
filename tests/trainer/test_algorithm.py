"""The algorithm of a run as values: what each choice asks for, and what the loss layer refuses before a start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from config_helpers import load, tables_kept

from megarl.batch import Batch
from megarl.config import config_dir, load_config
from megarl.plugins import load_plugins
from megarl.rollout.prefetch import Filter
from megarl.trainer.algorithm import Algorithm, check_vocabularies, make_algorithm

KL_LOSS = "actor.use_kl_loss=true actor.kl_loss_type="
KL_REWARD = "algorithm.use_kl_in_reward=true algorithm.kl_penalty="
GDPO = "algorithm.adv_estimator=gdpo algorithm.reward_weights={reward:1,format:0.5}"


def algorithm_of(*words: str) -> Algorithm:
    return make_algorithm(load(*words))


@pytest.mark.parametrize(
    ("words", "columns", "reads_reference", "reference_of_the_loss"),
    [
        ("", (), False, None),
        ("algorithm.adv_estimator=optimal_token_baseline", ("sum_pi_squared",), False, None),
        ("actor.router_replay=old", ("routed_experts",), False, None),
        ("actor.router_replay=rollout", (), False, None),
        (f"{KL_LOSS}k3", (), True, None),
        (f"{KL_LOSS}full", (), False, "ref"),
        (f"{KL_LOSS}full+", (), True, "ref"),
        (f"{KL_REWARD}k3", (), True, None),
        (f"{KL_REWARD}full", ("full_kl",), False, None),
        (f"algorithm.adv_estimator=optimal_token_baseline {KL_REWARD}full", ("sum_pi_squared", "full_kl"), False, None),
    ],
)
def test_each_choice_asks_for_the_columns_it_reads(
    words: str, columns: tuple[str, ...], reads_reference: bool, reference_of_the_loss: str | None
) -> None:
    algorithm = algorithm_of("rollout.n=2", *words.split())
    assert algorithm.columns == ("log_probs", *columns)
    assert algorithm.reads_reference == reads_reference
    assert algorithm.reference == ("ref" if "full_kl" in columns else None)
    assert algorithm.actor.reference == reference_of_the_loss


def test_several_mini_batches_leave_the_pass_all_but_the_first() -> None:
    more = ("data.train_batch_size=8", "actor.ppo_mini_batch_size=2", "algorithm.adv_estimator=grpo")
    algorithm = algorithm_of("rollout.n=2", *more)
    shares = [algorithm.old_log_prob_share(1, num_prompts) for num_prompts in (8, 4, 2, 1)]
    assert shares == [0.75, 0.5, 0, 0], "prompts may be lost"
    assert algorithm.old_log_prob_share(0, 8) == 1


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ("", [0, 100]),
        ("actor.old_log_prob_freq=2", [0, 2, 4, 100]),
        ("actor.old_log_prob_freq=1", [0, 1, 2, 3, 4, 100]),
        ("actor.old_log_prob_freq=0", []),
        ("actor.old_log_prob_freq=0 algorithm.adv_estimator=gae trainer.critic_warmup=2", [0, 1]),
        ("algorithm.policy_loss_fn=clip_cov", [0, 1, 2, 3, 4, 100]),
    ],
)
def test_iterations_make_a_pass_for_old_log_probs_where_one_is_needed_or_due(words: str, own: list[int]) -> None:
    algorithm = algorithm_of("rollout.n=2", "data.train_batch_size=4", "algorithm.adv_estimator=grpo", *words.split())
    assert [step for step in (0, 1, 2, 3, 4, 100) if algorithm.old_log_prob_share(step, 4) == 1] == own


@pytest.mark.parametrize(
    ("words", "critic", "greedy", "parts"),
    [
        ("algorithm.adv_estimator=gae", True, False, ()),
        ("algorithm.adv_estimator=grpo", False, False, ()),
        ("algorithm.adv_estimator=remax", False, True, ()),
        (GDPO, False, False, ("reward", "format")),
    ],
)
def test_each_estimator_gets_its_critic_its_greedy_completions_or_its_rewards(
    words: str, critic: bool, greedy: bool, parts: tuple[str, ...]
) -> None:
    algorithm = algorithm_of("rollout.n=2", *words.split())
    assert (algorithm.critic is not None, algorithm.wants_greedy, algorithm.reward_parts) == (critic, greedy, parts)
    assert algorithm.advantages["reward_weights"] == ((1.0, 0.5) if parts else ())


def test_rollout_correction_reaches_the_step_and_the_loss() -> None:
    off = algorithm_of()
    assert not off.actor.loss.use_rollout_weight  # type: ignore[union-attr]
    key = "algorithm.rollout_correction"
    how = algorithm_of(f"{key}.level=token", f"{key}.truncate=3", f"{key}.normalize=true")
    assert (how.correction.level, how.correction.truncate) == ("token", 3.0)
    assert how.actor.loss.use_rollout_weight  # type: ignore[union-attr]
    assert (how.actor.normalize, how.actor.bypass) == (True, False)
    assert algorithm_of(f"{key}.bypass=true").actor.bypass


def test_dynamic_sampling_is_a_filter() -> None:
    assert algorithm_of("rollout.n=2").keep is None
    key = "algorithm.filter_groups"
    words = [f"{key}.enable=true", f"{key}.metric=acc", f"{key}.max_num_gen_batches=3"]
    assert algorithm_of("rollout.n=2", *words).keep == Filter("acc", refill=True, max_batches=3)


def test_overlong_answers_cost_and_truncated_ones_leave_the_step() -> None:
    """Responses of 2, 4 and 5 tokens; at most 5, and the penalty grows over the last 2."""
    key = "algorithm.overlong_buffer"
    words = [f"{key}.enable=true", f"{key}.len=2", f"{key}.penalty_factor=0.5", "data.max_response_length=5"]
    batch = Batch(
        torch.arange(14),
        torch.tensor([3, 5, 6]),
        {"response_mask": torch.tensor([0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1.0])},
        {"score": torch.tensor([1.0, 1.0, 1.0]), "truncated": torch.tensor([0.0, 0.0, 1.0])},
    )
    shaped, stats = algorithm_of(*words, "algorithm.overlong_filtering=true").shape(batch)
    assert shaped.per_sequence["score"].tolist() == [1.0, 0.75, 0.5]
    assert shaped.columns["keep"].tolist() == [1.0] * 8 + [0.0] * 6
    assert stats["reward/overlong_penalty"].result() == pytest.approx(-0.25)
    assert stats["reward/overlong_filtered"].result() == pytest.approx(1 / 3)
    assert algorithm_of().shape(batch) == (batch, {})


MINE = """
from megarl.algo import register_adv_est, register_kl, register_policy_loss

@register_policy_loss("method_loss")
def method_loss(log_probs, old_log_probs, advantages, mask, segment_ids, *, strength=1.0):
    return strength * (log_probs - old_log_probs - advantages) ** 2, {}

@register_policy_loss("method_likelihood", uses_ratio=False)
def method_likelihood(log_probs, old_log_probs, advantages, mask, segment_ids):
    return -advantages * log_probs, {}

@register_adv_est("method_plain")
def method_plain(rewards, mask, segment_ids, *, how="fast"):
    return rewards, rewards

@register_adv_est("method_valued")
def method_valued(rewards, mask, segment_ids, *, values, greedy_score, sum_pi_squared):
    return rewards - values, rewards

@register_adv_est("method_referred")
def method_referred(rewards, mask, segment_ids, *, ref_log_probs):
    return rewards - ref_log_probs, rewards

@register_adv_est("method_demanding")
def method_demanding(rewards, mask, segment_ids, *, full_kl, raw_score, keep, reward_parts, gamma, lam):
    return rewards - full_kl, rewards

@register_adv_est("method_modest")
def method_modest(rewards, mask, segment_ids, *, full_kl=None, raw_score=None, keep=None, reward_parts=None):
    return rewards, rewards

@register_kl("method_kl")
def method_kl(log_probs, ref_log_probs):
    return log_probs - ref_log_probs

@register_kl("method_mean_kl")
def method_mean_kl(log_probs, ref_log_probs):
    return (log_probs - ref_log_probs).mean()

@register_adv_est("method_documented")
def method_documented(rewards, values, dones, gamma=0.99, gae_lambda=0.95, **kwargs):
    return rewards - values, rewards
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("mine") / "mine.py"
    file.write_text(MINE)
    with tables_kept():
        load_plugins([str(file)])
        yield f"algorithm.plugins=[{file}]"


def test_an_estimator_of_ones_own_gets_what_it_asks_for(mine: str) -> None:
    plain = algorithm_of(mine, "algorithm.adv_estimator=method_plain", "algorithm.adv_estimator_args.how=slow")
    assert (plain.critic, plain.columns, plain.wants_greedy) == (None, ("log_probs",), False)
    assert plain.advantages["adv_estimator_args"] == {"how": "slow"}
    valued = algorithm_of(mine, "algorithm.adv_estimator=method_valued")
    assert valued.critic is not None
    assert (valued.columns, valued.wants_greedy) == (("log_probs", "sum_pi_squared"), True)
    assert algorithm_of(mine, "algorithm.adv_estimator=method_documented").critic is not None


DEMANDING = (
    "algorithm.adv_estimator=method_demanding algorithm.reward_weights.reward=1 algorithm.overlong_filtering=true "
    f"algorithm.overlong_buffer.enable=true algorithm.overlong_buffer.len=5 {KL_LOSS}k3"
)


def test_an_estimator_gets_data_that_the_run_makes_and_settings_that_it_asks_for(mine: str) -> None:
    algorithm = algorithm_of(mine, *DEMANDING.split(), "algorithm.gamma=0.9", "algorithm.lam=0.5")
    assert (algorithm.reference, algorithm.reward_parts) == ("ref", ("reward",))
    assert (algorithm.advantages["gamma"], algorithm.advantages["lam"]) == (0.9, 0.5)
    modest = [mine, "algorithm.adv_estimator=method_modest"]
    assert (algorithm_of(*modest).reference, algorithm_of(*modest).reward_parts) == (None, ())
    assert algorithm_of(*modest, "algorithm.reward_weights.odd=2").reward_parts == ("odd",)
    assert algorithm_of(mine, "algorithm.adv_estimator=method_documented", "algorithm.lam=0.5").critic is not None


def test_a_kl_of_ones_own_may_be_in_the_reward(mine: str) -> None:
    assert algorithm_of(mine, *f"{KL_REWARD}method_kl".split()).advantages["kl_penalty"] == "method_kl"


@pytest.mark.parametrize("words", [f"{KL_LOSS}full", f"{KL_LOSS}full+", f"{KL_REWARD}full"])
def test_a_full_kl_compares_models_of_one_vocabulary(words: str, tmp_path: Path) -> None:
    for name, vocab_size in (("policy", 64), ("other", 72)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    policy, other = f"{tmp_path}/policy", f"{tmp_path}/other"
    with pytest.raises(ValueError, match=f"^ref.model.path={other}: its vocabulary has 72 tokens, .* has 64; "):
        load(f"model.path={policy}", f"ref.model.path={other}", *words.split())
    config = load(f"model.path={policy}", *words.split())
    with pytest.raises(ValueError, match="its vocabulary has 72 tokens"):  # of models that were not here before
        check_vocabularies(policy, other, config)
    check_vocabularies(policy, policy, config)


def test_a_loss_of_ones_own_without_a_ratio_may_be_weighted_beside_a_bypass(mine: str) -> None:
    key = "algorithm.rollout_correction"
    words = [mine, "algorithm.policy_loss_fn=method_likelihood", f"{key}.bypass=true", f"{key}.level=token"]
    assert algorithm_of(*words).actor.bypass


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("algorithm.policy_loss_fn=method_loss algorithm.policy_loss_args.stength=1", "stength"),
        ("algorithm.policy_loss_fn=no_such_loss", "algorithm.policy_loss_fn='no_such_loss': expected one of"),
        ("algorithm.adv_estimator=no_such_estimator", "algorithm.adv_estimator='no_such_estimator': expected one of"),
        (
            "algorithm.adv_estimator=method_plain algorithm.adv_estimator_args.hwo=slow",
            "algorithm.adv_estimator_args.hwo=slow: algorithm.adv_estimator=method_plain takes how",
        ),
        (
            "algorithm.adv_estimator=method_referred",
            "algorithm.adv_estimator=method_referred reads ref_log_probs: expected actor.use_kl_loss=true",
        ),
        (
            "algorithm.rollout_correction.level=token algorithm.rollout_correction.mask_low=0.5 "
            "algorithm.rollout_correction.mask_high=5",
            "algorithm.rollout_correction.truncate=2.0: a weight is cut by",
        ),
        (
            "algorithm.policy_loss_fn=method_loss algorithm.rollout_correction.bypass=true "
            "algorithm.rollout_correction.level=token",
            "level=token: with bypass=true the ratio of method_loss corrects already; expected null",
        ),
        (
            "algorithm.adv_estimator=method_plain algorithm.gamma=0.9",
            "algorithm.gamma=0.9: has no effect, because algorithm.adv_estimator=method_plain does not ask for it; "
            "expected 1.0",
        ),
        ("algorithm.adv_estimator=method_plain algorithm.lam=0.9", "algorithm.lam=0.9: has no effect"),
        (
            "algorithm.adv_estimator=method_plain algorithm.norm_adv_by_std_in_grpo=false",
            "algorithm.norm_adv_by_std_in_grpo=false: has no effect",
        ),
        (
            "algorithm.adv_estimator=method_plain algorithm.reward_weights.odd=1",
            "algorithm.reward_weights={odd: 1.0}: has no effect",
        ),
        (
            f"algorithm.policy_loss_fn=method_loss {KL_REWARD}low_vra_kl",
            "algorithm.kl_penalty=low_vra_kl: KL estimator 'low_vra_kl': expected one of kl, k1",
        ),
        (f"{KL_REWARD}method_mean_kl", "algorithm.kl_penalty=method_mean_kl: KL estimator method_mean_kl: it returns"),
        (
            f"{DEMANDING} algorithm.reward_weights={{}}",
            "algorithm.adv_estimator=method_demanding reads reward_parts: expected "
            "algorithm.reward_weights={NAME:WEIGHT",
        ),
        (
            f"{DEMANDING} algorithm.overlong_filtering=false",
            "reads keep: expected algorithm.overlong_filtering=true, else nothing is taken out",
        ),
        (
            DEMANDING.replace("algorithm.overlong_buffer.enable=true algorithm.overlong_buffer.len=5 ", ""),
            "reads raw_score: expected algorithm.overlong_buffer.enable=true, else it is the score",
        ),
        (
            f"{DEMANDING} trainer.n_gpus_per_node=2 ref.megatron.tensor_model_parallel_size=2",
            "ref.megatron.tensor_model_parallel_size=2 with algorithm.adv_estimator=method_demanding: both models run",
        ),
        ("algorithm.rollout_correction.reject_by=k1", "reject_by=k1: needs reject_low, reject_high or both"),
        (
            "algorithm.rollout_correction.reject_by=k3 algorithm.rollout_correction.reject_low=0",
            "algorithm.rollout_correction.reject_low=0.0: k3 has only an upper bound",
        ),
    ],
)
def test_what_the_loss_layer_refuses_is_refused_before_anything_starts(words: str, told: str, mine: str) -> None:
    config, _ = load_config(["data.train_files=a", "model.path=m", mine, *words.split()])
    with pytest.raises(ValueError, match=r"^(algorithm|ref)\.") as caught:
        make_algorithm(config)
    assert told in str(caught.value)


def test_every_recipe_has_a_method() -> None:
    configs: Any = [load_config([f"recipe={path.stem}"])[0] for path in (config_dir() / "recipe").glob("*[!t].yaml")]
    assert all(make_algorithm(config).columns == ("log_probs",) for config in configs)


def test_an_importance_of_a_kl_that_is_off_may_rest_in_a_recipe(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("actor: {use_kl_loss: true, kl_importance: true}")
    assert not algorithm_of(f"recipe={recipe}", "actor.use_kl_loss=false").actor.loss.kl_importance
