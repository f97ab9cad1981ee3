"""What `trainer.check_only` prints."""

import io

import pytest
from rich.console import Console

from megarl.config import load_config, used_roles
from megarl.plan.from_config import role_of
from megarl.plan.gpu_budget import equal_stages
from megarl.plan.report import report


def config_of(*words):
    return load_config([*words, "data.train_files=[train.jsonl]"], command="train")[0]


def roles_of(config):
    return [role_of(config, name) for name in used_roles(config, "train")]


def printed(config):
    console = Console(width=160, record=True, file=io.StringIO())
    report(config, console)
    return console.export_text()


def test_every_role_that_is_used_has_a_row():
    words = ("model=qwen3_mini", "layout=4xcpu", "actor.use_kl_loss=true")
    assert [role.name for role in roles_of(config_of(*words))] == ["actor", "critic", "ref"]
    roles = roles_of(config_of(*words, "algorithm.adv_estimator=grpo", "rollout.n=4"))
    assert [role.name for role in roles] == ["actor", "ref"]


def test_stages_that_hold_as_much_share_a_row():
    config = config_of("recipe=grpo_deepseek_v3_671b_64x8h200")
    (actor,) = roles_of(config)
    found = equal_stages(actor)
    assert sum(stages.layers * (stages.last - stages.first + 1) for stages in found) == 61
    assert found[0].first == 0 and found[-1].last == actor.layout.pp - 1
    assert len(found) <= 3


def test_a_table_of_the_72b_run():
    text = printed(config_of("recipe=grpo_qwen2_5_72b_8x8h100"))
    assert "72,706,203,648" in text
    assert "0-63" in text
    assert "smallest rank: actor" in text and "largest rank: actor" in text
    assert "the trainer's, in turns" in text


def test_a_critic_may_lie_otherwise():
    config = config_of(
        "model=qwen3_mini",
        "layout=2xcpu",
        "critic.megatron.tensor_model_parallel_size=1",
        "critic.megatron.sequence_parallel=false",
        "critic.megatron.pipeline_model_parallel_size=2",
    )
    actor, critic = roles_of(config)
    assert (actor.layout.tp, actor.layout.pp) == (2, 1)
    assert (critic.layout.tp, critic.layout.pp) == (1, 2)
    assert [stages.name for stages in equal_stages(critic)] == ["0", "1"]


def test_teachers_are_listed_with_their_own_layouts():
    config = config_of(
        "model=qwen3_mini",
        "layout=2xcpu",
        "teachers.math.model.path=runs/models/qwen3_mini",
        "teachers.math.megatron.tensor_model_parallel_size=1",
        "teachers.math.megatron.sequence_parallel=false",
        "teachers.math.megatron.pipeline_model_parallel_size=2",
    )
    *_, math = roles_of(config)
    assert (math.name, math.layout.pp) == ("teachers.math", 2)
    assert [stages.name for stages in equal_stages(math)] == ["0", "1"]


def test_a_model_that_nothing_is_known_of_is_refused():
    with pytest.raises(ValueError, match="^model.path=org/name: its config.json is not here; expected"):
        roles_of(config_of("model.path=org/name"))
    for path in ("org/name", "a/b/c"):  # the second may be made first
        console = Console(record=True, width=200)
        report(config_of(f"model.path={path}"), console)
        assert console.export_text().startswith(f"model.path={path}: its config.json is not on this machine; layout ")
