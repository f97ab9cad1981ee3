"""All faults of a command line are told at once, and each once."""

from pathlib import Path

import pytest
from config_helpers import BASE, DENSE, refusal, refusals

from megarl.cli import main
from megarl.config import ConfigError, load_sweep


def test_unknown_keys_wrong_types_and_impossible_values_are_told_together() -> None:
    assert refusals("actor.clip_ration=0.1", "rollout.n=two", "algorithm.gamma=7", "rollout.n=") == [
        "actor.clip_ration=0.1: there is no key actor.clip_ration; did you mean actor.clip_ratio?",
        "rollout.n=two: expected an integer",
        "rollout.n=: expected an integer",
        "algorithm.gamma=7.0: expected a number from 0 to 1",
    ]


def test_layouts_combinations_and_keys_without_effect_are_told_together() -> None:
    layout, combination = refusals(DENSE, "actor.megatron.tensor_model_parallel_size=3", "trainer.critic_warmup=5",
                                   "trainer.total_training_steps=5", "trainer.n_gpus_per_node=4")  # fmt: skip
    assert layout.startswith("actor.megatron.tensor_model_parallel_size=3 does not divide the model's num_attention")
    assert combination.startswith("trainer.critic_warmup=5: expected fewer than")
    combination, effect = refusals("algorithm.adv_estimator=grpo", "algorithm.lam=0.9")
    assert combination.startswith("rollout.n=1: algorithm.adv_estimator=grpo compares")
    assert effect.startswith("algorithm.lam=0.9: has no effect")


def test_faults_of_a_file_come_with_those_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("actor: {optim: {lrr: 1}}\nrollout: {n: two}\n")
    assert refusals(f"recipe={file}", "trainer.seed=x") == [
        f"{file}: actor.optim.lrr=1: there is no key actor.optim.lrr; did you mean actor.optim.lr?",
        f"{file}: rollout.n=two: expected an integer",
        "trainer.seed=x: expected an integer",
    ]
    first, second = refusals(f"recipe={tmp_path}/absent.yaml", "trainer.seed=x")
    assert first == "trainer.seed=x: expected an integer"
    assert second.startswith(f"{tmp_path}/absent.yaml: cannot be read as YAML")


def test_a_key_that_could_not_be_taken_is_not_told_as_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        load_sweep([*BASE[:1], "model.pth=m", "rollout.n=1,2"])
    assert str(caught.value).startswith("model.pth=m: there is no key model.pth")
    assert "is not set" not in str(caught.value)


def test_a_fault_is_not_repeated_for_keys_that_follow_unless_they_are_set() -> None:
    assert refusal("actor.ppo_epochs=0") == "actor.ppo_epochs=0: expected at least 1"
    assert refusals("actor.ppo_epochs=0", "critic.ppo_epochs=0") == [
        "actor.ppo_epochs=0: expected at least 1",
        "critic.ppo_epochs=0: expected at least 1",
    ]
    assert len(refusals("actor.ppo_max_token_len_per_gpu=100", "rollout.max_total_tokens=100")) == 2


def test_references_to_other_keys_are_told_together() -> None:
    assert [said.partition(":")[0] for said in refusals("actor.optim.lr=${a.b}", "rollout.n=${model.path}")] == [
        "actor.optim.lr=${a.b}",
        "rollout.n=${model.path}",
    ]


def test_of_a_sweep_all_words_and_the_first_wrong_value_of_each_key_are_told() -> None:
    with pytest.raises(ConfigError) as caught:
        load_sweep([*BASE, "rollout.n=2,two,three", "algorithm.gamma=7,0.5", "trainer.seed=x"])
    assert str(caught.value).split("\n") == [
        "trainer.seed=x: expected an integer",
        "algorithm.gamma=7.0: expected a number from 0 to 1",
        "rollout.n=two: expected an integer",
    ]
    with pytest.raises(ConfigError) as caught:
        load_sweep(["a", "~b", *BASE, "rollout.n=2,3"])
    assert [said.partition(":")[0] for said in str(caught.value).split("\n")] == ["a", "~b"]


def test_the_command_prints_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *BASE, "rollout.n=two", "trainer.seed=x"]) == 2
    assert capsys.readouterr().err == (
        "error: rollout.n=two: expected an integer\nerror: trainer.seed=x: expected an integer\n"
    )
