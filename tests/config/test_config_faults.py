"""All faults of a command line are told at once, and each once."""

from pathlib import Path

import pytest
from config_helpers import BASE, DENSE, refusal, refusals

from megarl.cli import main
from megarl.config import Config, ConfigError, load_config, load_sweep
from megarl.config.validate.models import missing_folders


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
    assert second.startswith(f"recipe={tmp_path}/absent.yaml: no such file")


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


def test_the_command_prints_a_line_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").touch()
    words = [f"data.train_files=[{tmp_path}/a.jsonl]", "model.path=m", "rollout.n=two", "trainer.seed=x"]
    assert main(["train", *words]) == 2
    assert capsys.readouterr().err == (
        "error: rollout.n=two: expected an integer\nerror: trainer.seed=x: expected an integer\n"
    )


LORA = ("trainer.n_gpus_per_node=2", "actor.strategy=fsdp", "actor.lora.rank=8")


def test_words_values_layouts_combinations_and_keys_without_effect_are_told_together() -> None:
    words = ("actor.clip_ration=0.1", "algorithm.gamma=7", "trainer.n_gpus_per_node=6",
             "actor.megatron.tensor_model_parallel_size=3", "trainer.critic_warmup=5", "trainer.total_training_steps=5",
             "sft.epochs=2")  # fmt: skip
    told = refusals(DENSE, *LORA, *words)
    assert [said.partition(":")[0] for said in told if "parallel" not in said] == [
        "actor.clip_ration=0.1",
        "algorithm.gamma=7.0",
        "actor.strategy=fsdp",
        "trainer.critic_warmup=5",
    ]
    assert sum(said.startswith("actor.megatron.tensor_model_parallel_size=3 does not") for said in told) == 1
    *_, unused = refusals("actor.clip_ration=0.1", "sft.epochs=2")
    assert unused.startswith("sft.epochs=2: has no effect")


@pytest.mark.parametrize(
    "word, others",
    [
        ("actor.strategy=fspd", ("actor.lora.rank=8",)),
        ("rollout.n=two", ("algorithm.adv_estimator=grpo",)),  # GRPO refuses the default, 1
        ("rollout.m=8", ("algorithm.adv_estimator=grpo",)),
        ("actor.rollout.n=8", ("algorithm.adv_estimator=grpo",)),
        ("trainer.n_gpus_per_node=four", ("actor.megatron.tensor_model_parallel_size=4",)),
        ("actor.num_ranks=0", ("actor.megatron.tensor_model_parallel_size=2",)),
        ("algorithm.use_kl_in_reward=treu", ("ref.megatron.tensor_model_parallel_size=1",)),
        ("algorithm.adv_estimator=gea", ("algorithm.lam=0.9", "critic.optim.lr=1e-4")),
        ("trainer.save_freq=often", ("trainer.on_nonfinite=rollback",)),
        ("data.train_batch_size=0", ("actor.ppo_mini_batch_size=100",)),
        ("trainer.nnodes=two", ("trainer.node_rank=1", "trainer.master_addr=a")),
    ],
)
def test_what_may_follow_from_a_word_that_was_left_out_is_not_told(word: str, others: tuple[str, ...]) -> None:
    assert refusal(word, *others).startswith(f"{word}: ")


def test_of_a_value_that_is_left_out_the_one_below_counts(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("actor: {strategy: fsdp, ppo_epochs: -1}\ntrainer: {n_gpus_per_node: 2}\n")
    assert refusals(f"recipe={file}", "actor.ppo_epochs=0", "actor.lora.rank=8") == [
        "actor.ppo_epochs=0: expected at least 1",
        "actor.ppo_epochs=-1: expected at least 1",
        "actor.strategy=fsdp: actor.lora.rank=8 trains adapters only; expected megatron",
    ]


def test_beside_a_file_that_cannot_be_read_only_what_is_typed_is_told(tmp_path: Path) -> None:
    words = ("actor.optim.min_lr=2.0", "actor.optim.lr=1.0", "algorithm.adv_estimator=grpo", "algorithm.gamma=7")
    with pytest.raises(ConfigError) as caught:
        load_config([f"recipe={tmp_path}/absent.yaml", *words])
    assert [said.partition(": ")[0] for said in caught.value.sentences] == [
        f"recipe={tmp_path}/absent.yaml",
        "algorithm.gamma=7.0",
        "actor.optim.min_lr=2.0",
    ]


def test_a_needed_key_is_told_beside_words_that_were_not_meant_for_it() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["model.path=m", "actor.clip_ration=0.1"])
    _, missing = caught.value.sentences
    assert missing.startswith("data.train_files is not set: ")
    with pytest.raises(ConfigError) as caught:
        load_config(["model.path=m", "data.xyz=[a.jsonl]"])
    assert len(caught.value.sentences) == 1, "it may have been meant by this"


def test_models_and_files_that_are_not_there_are_told_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model.path=/no/model", "critic.model.path=/no/critic", "data.train_files=[/no/file.jsonl]"]
    assert main(["train", *words, "algorithm.adv_estimator=gae"]) == 2
    told = [line.partition(": no such")[0] for line in capfd.readouterr().err.splitlines() if "error: " in line]
    assert told == ["error: model.path=/no/model", "error: critic.model.path=/no/critic", "error: /no/file.jsonl"]


@pytest.mark.parametrize("path", ["organization/name", "name", "runs/models/mini", ""])
def test_a_model_that_a_hub_or_the_run_itself_may_give_is_not_told_as_missing(path: str) -> None:
    config = Config()
    config.model.path = path
    assert not list(missing_folders(config, ("actor",)))
