"""The models of a run, from the configuration."""

from __future__ import annotations

from typing import Any, cast

import pytest
from config_helpers import load

from megarl.group import Group
from megarl.ragged import names_in_batch
from megarl.sample import SUPPORT
from megarl.trainer.algorithm import make_algorithm
from megarl.trainer.roles import make_roles


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
    config = load("rollout.engine=hf", "actor.use_kl_loss=true", *words)
    roles = make_roles(config, make_algorithm(config), no_group)
    assert roles.reference is not None
    assert roles.actor.inputs == roles.reference.inputs == read


def test_no_critic_reads_supports() -> None:
    config = load("rollout.engine=hf", "algorithm.adv_estimator=gae", "rollout.top_p=0.9")
    roles = make_roles(config, make_algorithm(config), no_group)
    assert roles.critic is not None
    assert roles.critic.inputs == ()


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
