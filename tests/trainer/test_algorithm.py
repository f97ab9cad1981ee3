"""The algorithm and the models of a run: what each choice asks for, and what the loss layer refuses before a start."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from config_helpers import load, tables_kept

from megarl.config import config_dir, load_config
from megarl.group import Group
from megarl.plugins.load import load_plugins
from megarl.rollout.group_filter import Filter
from megarl.samples.batch import Batch
from megarl.samples.ragged import names_in_batch
from megarl.samples.sample import SUPPORT
from megarl.trainer.algorithm import Algorithm, check_vocabularies, make_algorithm
from megarl.trainer.roles import make_roles

EST = "algorithm.adv_estimator="
LOSS = "algorithm.policy_loss_fn="
CORRECTION = "algorithm.rollout_correction."
KL_LOSS = "actor.use_kl_loss=true actor.kl_loss_type="
KL_REWARD = "algorithm.use_kl_in_reward=true algorithm.kl_penalty="
GDPO = EST + "gdpo algorithm.reward_weights={reward:1,format:0.5}"


def algorithm_of(*words: str) -> Algorithm:
    return make_algorithm(load(*words))


@pytest.mark.parametrize(
    ("words", "columns", "reads_reference", "reference_of_the_loss"),
    [
        ("", (), False, None),
        (f"{EST}optimal_token_baseline", ("sum_pi_squared",), False, None),
        ("actor.router_replay=old", ("routed_experts",), False, None),
        ("actor.router_replay=rollout", (), False, None),
        (f"{KL_LOSS}k3", (), True, None),
        (f"{KL_LOSS}full", (), False, "ref"),
        (f"{KL_LOSS}full+", (), True, "ref"),
        (f"{KL_REWARD}k3", (), True, None),
        (f"{KL_REWARD}full", ("full_kl",), False, None),
        (f"{EST}optimal_token_baseline {KL_REWARD}full", ("sum_pi_squared", "full_kl"), False, None),
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
    if not words:  # several mini-batches leave the pass all but the first; prompts may be lost
        several = algorithm_of("rollout.n=2", "data.train_batch_size=8", "actor.ppo_mini_batch_size=2", f"{EST}grpo")
        assert [several.old_log_prob_share(1, num_prompts) for num_prompts in (8, 4, 2, 1)] == [0.75, 0.5, 0, 0]


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


def test_rollout_correction_and_dynamic_sampling_reach_the_step_and_the_loss() -> None:
    off = algorithm_of("rollout.n=2")
    assert off.keep is None and not off.actor.loss.use_rollout_weight  # type: ignore[union-attr]
    sampling = [f"algorithm.filter_groups.{word}" for word in ("enable=true", "metric=acc", "max_num_gen_batches=3")]
    how = algorithm_of("rollout.n=2", *(f"{CORRECTION}{w}" for w in ("level=token", "truncate=3", "normalize=true")))
    assert (how.correction.level, how.correction.truncate) == ("token", 3.0)
    assert how.actor.loss.use_rollout_weight  # type: ignore[union-attr]
    assert (how.actor.normalize, how.actor.bypass) == (True, False)
    sampled = algorithm_of("rollout.n=2", *sampling, f"{CORRECTION}bypass=true")
    assert sampled.actor.bypass
    assert sampled.keep == Filter("acc", refill=True, max_batches=3)


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
    shaped, stats = algorithm_of(*words, "algorithm.overlong_filtering=true").shape(batch, seed=0)
    assert shaped.per_sequence["score"].tolist() == [1.0, 0.75, 0.5]
    assert shaped.columns["keep"].tolist() == [1.0] * 8 + [0.0] * 6
    assert stats["reward/overlong_penalty"].result() == pytest.approx(-0.25)
    assert stats["reward/overlong_filtered"].result() == pytest.approx(1 / 3)
    assert algorithm_of().shape(batch, seed=0) == (batch, {})


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
    plain = algorithm_of(mine, f"{EST}method_plain", "algorithm.adv_estimator_args.how=slow")
    assert (plain.critic, plain.columns, plain.wants_greedy) == (None, ("log_probs",), False)
    assert plain.advantages["adv_estimator_args"] == {"how": "slow"}
    valued = algorithm_of(mine, f"{EST}method_valued")
    assert valued.critic is not None
    assert (valued.columns, valued.wants_greedy) == (("log_probs", "sum_pi_squared"), True)
    assert algorithm_of(mine, f"{EST}method_documented", "algorithm.lam=0.5").critic is not None
    algorithm = algorithm_of(mine, *DEMANDING.split(), "algorithm.gamma=0.9", "algorithm.lam=0.5")
    assert (algorithm.reference, algorithm.reward_parts) == ("ref", ("reward",))
    assert (algorithm.advantages["gamma"], algorithm.advantages["lam"]) == (0.9, 0.5)
    modest = [mine, f"{EST}method_modest"]
    assert (algorithm_of(*modest).reference, algorithm_of(*modest).reward_parts) == (None, ())
    assert algorithm_of(*modest, "algorithm.reward_weights.odd=2").reward_parts == ("odd",)


BUFFER = "algorithm.overlong_buffer.enable=true algorithm.overlong_buffer.len=5"
DEMANDING = f"{EST}method_demanding algorithm.reward_weights.reward=1 algorithm.overlong_filtering=true {BUFFER} "
DEMANDING += f"{KL_LOSS}k3"


def test_a_kl_and_a_loss_without_a_ratio_of_ones_own_may_be_in_the_reward_and_beside_a_bypass(mine: str) -> None:
    assert algorithm_of(mine, *f"{KL_REWARD}method_kl".split()).advantages["kl_penalty"] == "method_kl"
    words = f"{LOSS}method_likelihood {CORRECTION}bypass=true {CORRECTION}level=token"
    assert algorithm_of(mine, *words.split()).actor.bypass


def test_a_full_kl_compares_vocabularies_of_models_that_were_not_here_before(tmp_path: Path) -> None:
    for name, vocab_size in (("policy", 64), ("other", 72)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    policy, other = f"{tmp_path}/policy", f"{tmp_path}/other"
    for words in (f"{KL_LOSS}full", f"{KL_LOSS}full+", f"{KL_REWARD}full"):
        config = load(f"model.path={policy}", *words.split())
        with pytest.raises(ValueError, match="its vocabulary has 72 tokens, .* the 64 of model.path="):
            check_vocabularies(policy, other, config)
        check_vocabularies(policy, policy, config)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (f"{LOSS}method_loss algorithm.policy_loss_args.stength=1", "stength"),
        (f"{LOSS}no_such_loss", "policy_loss_fn='no_such_loss': expected one of"),
        (f"{EST}no_such_estimator", "adv_estimator='no_such_estimator': expected one of"),
        (f"{EST}method_plain algorithm.adv_estimator_args.hwo=slow", "_args.hwo=slow: .*=method_plain takes how"),
        (f"{EST}method_referred", "=method_referred reads ref_log_probs: expected actor.use_kl_loss=true"),
        (
            f"{CORRECTION}level=token {CORRECTION}mask_low=0.5 {CORRECTION}mask_high=5",
            "truncate=2.0: a weight is cut by",
        ),
        (
            f"{LOSS}method_loss {CORRECTION}bypass=true {CORRECTION}level=token",
            "level=token: with bypass=true the ratio of method_loss corrects already; expected null",
        ),
        (f"{EST}method_plain algorithm.gamma=0.9", "gamma=0.9: has no effect, .*does not ask for it; expected 1.0"),
        (f"{EST}method_plain algorithm.lam=0.9", "lam=0.9: has no effect"),
        (f"{EST}method_plain algorithm.norm_adv_by_std_in_grpo=false", "_in_grpo=false: has no effect"),
        (f"{EST}method_plain algorithm.reward_weights.odd=1", "reward_weights={odd: 1.0}: has no effect"),
        (f"{LOSS}method_loss {KL_REWARD}low_vra_kl", "kl_penalty=low_vra_kl: KL .* expected one of kl, k1"),
        (f"{KL_REWARD}method_mean_kl", "kl_penalty=method_mean_kl: KL estimator method_mean_kl: it returns"),
        (f"{DEMANDING} algorithm.reward_weights={{}}", "reads reward_parts: expected algorithm.reward_weights={NAME:"),
        (f"{DEMANDING} algorithm.overlong_filtering=false", "reads keep: expected algorithm.overlong_filtering=true"),
        (DEMANDING.replace(BUFFER, ""), "reads raw_score: expected algorithm.overlong_buffer.enable=true"),
        (
            f"{DEMANDING} trainer.n_gpus_per_node=2 ref.megatron.tensor_model_parallel_size=2",
            "megatron.tensor_model_parallel_size=2 with .*=method_demanding: both models run",
        ),
        (f"{CORRECTION}reject_by=k1", "reject_by=k1: needs reject_low, reject_high or both"),
        (f"{CORRECTION}reject_by=k3 {CORRECTION}reject_low=0", "reject_low=0.0: k3 has only an upper bound"),
    ],
)
def test_what_the_loss_layer_refuses_is_refused_before_anything_starts(words: str, told: str, mine: str) -> None:
    config, _ = load_config(["data.train_files=a", "model.path=m", mine, *words.split()])
    with pytest.raises(ValueError, match=rf"^(algorithm|ref)\..*{told}"):
        make_algorithm(config)


@pytest.mark.full
def test_every_recipe_has_a_method() -> None:
    configs: Any = [load_config([f"recipe={path.stem}"])[0] for path in (config_dir() / "recipe").glob("*[!t].yaml")]
    assert all(make_algorithm(config).columns == ("log_probs",) for config in configs)


def test_an_importance_of_a_kl_that_is_off_may_rest_in_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("actor: {use_kl_loss: true, kl_importance: true}")
    assert not algorithm_of(f"recipe={recipe}", "actor.use_kl_loss=false").actor.loss.kl_importance  # type: ignore


def no_group(role: Any) -> Group:  # noqa: ARG001
    """Nothing is sent to it while roles are made."""
    return cast(Group, None)


@pytest.mark.parametrize(
    ("words", "read"),
    [([], ()), (["rollout.top_p=0.9"], names_in_batch(SUPPORT)), (["rollout.top_k=20"], names_in_batch(SUPPORT))],
)
def test_the_actor_and_the_reference_of_a_narrowed_run_alone_read_supports(
    words: list[str], read: tuple[str, ...]
) -> None:
    config = load("rollout.engine=hf", "actor.use_kl_loss=true", "algorithm.adv_estimator=gae", *words)
    roles = make_roles(config, make_algorithm(config), no_group)
    assert roles.reference is not None
    assert roles.actor.inputs == roles.reference.inputs == read
    assert roles.critic is not None and roles.critic.inputs == ()


@pytest.mark.parametrize(
    ("offloaded", "stay"),
    [
        ([], ["actor", "critic", "ref"]),
        (["param"], ["actor", "critic"]),
        (["optimizer"], ["actor", "critic", "ref"]),
        (["param", "optimizer"], []),
    ],
)
def test_on_shared_gpus_a_role_comes_with_the_trainers_turn_if_any_of_it_stays(
    offloaded: list[str], stay: list[str]
) -> None:
    """Moments of offloaded weights too, which else would be beside the servers."""
    words = ["rollout.engine=hf", "rollout.placement=shared", "algorithm.adv_estimator=gae", "actor.use_kl_loss=true"]
    config = load(*words, *[f"actor.megatron.{part}_offload=true" for part in offloaded])
    assert [role.name for role in make_roles(config, make_algorithm(config), no_group).residents] == stay
    apart = load(*[word for word in words if "placement" not in word])
    assert make_roles(apart, make_algorithm(apart), no_group).residents == ()
