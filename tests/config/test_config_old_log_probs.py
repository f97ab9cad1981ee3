"""Which settings need a forward pass for the old log-probs before the first optimizer step."""

import pytest
from config_helpers import load, refusal

from megarl.config.old_log_probs import pass_share, source_of_old_log_probs, why_own_pass

CORRECTION = "algorithm.rollout_correction"
TEACHERS = "teachers={math:{model:{path:m}}}"


# WORDS; the first line has none
FIRST_STEP = f"""
algorithm.adv_estimator=grpo
actor.ppo_epochs=4
data.train_batch_size=8 actor.ppo_mini_batch_size=4
actor.use_kl_loss=true actor.kl_loss_type=full
algorithm.policy_loss_fn=cispo
{CORRECTION}.bypass=true
rollout.ahead=2 rollout.max_age=1
actor.router_replay=rollout
actor.old_log_prob_freq=1
algorithm.adv_estimator=none {TEACHERS}
algorithm.plugins=[mine.py] algorithm.policy_loss_fn=mine algorithm.adv_estimator=mine
"""


@pytest.mark.parametrize("words", FIRST_STEP.rstrip().split("\n"))
def test_the_first_step_gives_them(words: str) -> None:
    assert why_own_pass(load("rollout.n=2", *words.split())) is None


# WORDS | why, where "^" stands for the last of the words
OWN_PASS = f"""
algorithm.adv_estimator=optimal_token_baseline | ^ reads old_log_probs and sum_pi_squared
algorithm.use_kl_in_reward=true | ^ compares them with the reference's
{CORRECTION}.level=token | ^ makes weights of them
{CORRECTION}.reject_high=1 {CORRECTION}.reject_by=k3 | ^ rejects by them
algorithm.policy_loss_fn=clip_cov | ^ selects tokens of a whole step by them
actor.router_replay=old | ^ replays the experts of this pass
{TEACHERS} distill.form=reward | ^ compares them with the teachers'
"""


@pytest.mark.parametrize("row", OWN_PASS.strip().splitlines())
def test_what_reads_them_before_needs_the_pass_and_says_so(row: str) -> None:
    typed, why = row.split(" | ")
    words = ["rollout.n=2", *typed.split()]
    config, why = load(*words), why.replace("^", words[-1])
    assert why_own_pass(config) == why
    assert source_of_old_log_probs(config, why) == f"old log-probs: of a forward pass of their own, because {why}"
    said = refusal(*words, "actor.old_log_prob_freq=5")
    assert said.startswith("actor.old_log_prob_freq=5: has no effect, because each iteration makes a forward pass")


def test_functions_of_plug_ins_need_it_for_what_they_read() -> None:
    config = load("algorithm.plugins=[mine.py]", "algorithm.policy_loss_fn=mine", "algorithm.adv_estimator=yours")
    reads = why_own_pass(config, estimator_reads={"group_ids": False, "old_log_probs": True}, loss_selects=False)
    assert reads == "algorithm.adv_estimator=yours reads old_log_probs"
    selects = why_own_pass(config, estimator_reads={}, loss_selects=True)
    assert selects == "algorithm.policy_loss_fn=mine selects tokens of a whole step by them"


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("actor.old_log_prob_freq=1", "a forward pass of their own, because actor.old_log_prob_freq=1 asks for it"),
        (
            "actor.old_log_prob_freq=0",
            "the forward pass of the first optimizer step, never checked (actor.old_log_prob_freq)",
        ),
        (
            "data.train_batch_size=8 actor.ppo_mini_batch_size=2",
            "the forward pass of the first optimizer step and of one over the other 75% of the samples, checked by a "
            "pass of their own every 100 iterations (actor.old_log_prob_freq)",
        ),
    ],
)
def test_a_line_says_where_they_come_from(words: str, where: str) -> None:
    assert source_of_old_log_probs(load(*words.split()), None) == f"old log-probs: of {where}"


@pytest.mark.parametrize(
    ("words", "share"),
    [
        ("", 0),
        ("data.train_batch_size=8 actor.ppo_mini_batch_size=2", 0.75),
        ("actor.old_log_prob_freq=1", 1),
        ("algorithm.policy_loss_fn=clip_cov data.train_batch_size=8 actor.ppo_mini_batch_size=2", 1),
    ],
)
def test_a_pass_covers_what_the_first_step_does_not_give(words: str, share: float) -> None:
    assert pass_share(load(*words.split())) == share


def test_a_run_says_how_often_it_checks() -> None:
    assert load().actor.old_log_prob_freq == 100
    assert refusal("actor.old_log_prob_freq=-1") == "actor.old_log_prob_freq=-1: expected a number of at least 0"
