"""Lines at the start on what cannot act: clips with one optimizer step an iteration, a critic that hardly learns."""

import pytest
from config_helpers import load

from megarl.config.validate.algorithms import idle

GRPO = ("algorithm.adv_estimator=grpo", "rollout.n=4", "data.train_batch_size=8")


def lines(*words: str) -> list[str]:
    return list(idle(load(*words)))


@pytest.mark.parametrize(
    ("words", "is_told"),
    [
        (["actor.ppo_mini_batch_size=8"], True),
        (["actor.ppo_mini_batch_size=8", "algorithm.policy_loss_fn=cispo"], True),
        (["actor.ppo_mini_batch_size=4"], False),
        (["actor.ppo_mini_batch_size=8", "actor.ppo_epochs=2"], False),
        (["actor.ppo_mini_batch_size=8", "algorithm.policy_loss_fn=reinforce"], False),  # it has no ratio
        (["actor.ppo_mini_batch_size=8", "algorithm.rollout_correction.bypass=true"], False),  # that to the servers
    ],
)
def test_one_optimizer_step_an_iteration_leaves_clips_idle(words: list[str], is_told: bool) -> None:
    found = lines(*GRPO, *words)
    assert len(found) == is_told and all("actor.ppo_epochs=2" in line for line in found)


def test_a_critic_that_learns_more_slowly_than_the_policy_is_told() -> None:
    words = ("data.train_batch_size=8", "actor.ppo_mini_batch_size=4", "actor.optim.lr=1e-4")
    (found,) = lines(*words)
    assert found.startswith("critic.optim.lr=1e-05 is below actor.optim.lr=0.0001")
    assert not lines(*words, "critic.optim.lr=1e-3")
    assert not lines(*words, *GRPO), "there is no critic"


@pytest.mark.parametrize(
    ("width", "words", "is_told"),
    [
        (64, ["actor.optim.lr=1e-3"], False),
        (576, ["actor.optim.lr=1e-4"], False),
        (576, ["actor.optim.lr=0.0003"], True),
        (576, ["actor.optim.lr=3e-4", "actor.lora.rank=8"], False),
        (3584, ["actor.optim.lr=3e-05"], True),
    ],
)
def test_a_rate_that_destroys_a_model_of_this_width_is_told(width: int, words: list[str], is_told: bool) -> None:
    found = lines(f"+model.config.hidden_size={width}", *GRPO, *words, "actor.ppo_mini_batch_size=4")
    assert [line.partition(": for a model of this width")[0] for line in found] == words[:1] * is_told
