"""A command line is checked in stages: words and files, values, layouts, combinations.  All faults of one are told."""

import json
import re
from pathlib import Path

import pytest
import yaml
from config_helpers import BASE, DENSE, refusal, refusals
from omegaconf import OmegaConf

from megarl.cli import main
from megarl.config import Config, ConfigError, load_config, load_sweep, read_yaml, to_yaml
from megarl.config.validate.models import missing_folders


def keys(*words: str) -> list[str]:
    """KEY=VALUE of each sentence."""
    return [said.partition(":")[0].split(" does not divide")[0] for said in refusals(*words)]


WORDS = ("actor.clip_ration=0.1", "rollout.n=two")
VALUES = ("algorithm.gamma=7", "rollout.n=0")
LAYOUTS = ("trainer.n_gpus_per_node=6", "actor.megatron.tensor_model_parallel_size=3")
COMBINATIONS = ("algorithm.adv_estimator=grpo", "algorithm.lam=0.9")


def test_the_first_stage_with_faults_tells_all_of_its_own() -> None:
    assert keys(DENSE, *COMBINATIONS, *LAYOUTS, *VALUES, *WORDS) == list(WORDS)
    assert set(keys(DENSE, *COMBINATIONS, *LAYOUTS, *VALUES)) == {"algorithm.gamma=7.0", "rollout.n=0"}
    assert keys(DENSE, *COMBINATIONS, *LAYOUTS) == ["actor.megatron.tensor_model_parallel_size=3"]
    assert keys(DENSE, *COMBINATIONS) == ["rollout.n=1", "algorithm.lam=0.9"]


def test_needed_keys_are_told_with_the_values() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["model.path=m", "algorithm.gamma=7"])
    assert [said.split()[0] for said in caught.value.sentences] == ["algorithm.gamma=7.0:", "data.train_files"]


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


def test_a_wrong_value_is_not_repeated_for_keys_that_follow_unless_they_are_set() -> None:
    assert refusal("actor.ppo_epochs=0") == "actor.ppo_epochs=0: expected at least 1"
    assert refusals("actor.ppo_epochs=0", "critic.ppo_epochs=0") == [
        "actor.ppo_epochs=0: expected at least 1",
        "critic.ppo_epochs=0: expected at least 1",
    ]


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
        "rollout.n=two: expected an integer",
    ]
    with pytest.raises(ConfigError) as caught:
        load_sweep(["a", "~b", *BASE, "rollout.n=2,3"])
    assert [said.partition(":")[0] for said in str(caught.value).split("\n")] == ["a", "~b"]


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


@pytest.mark.parametrize(
    "value",
    [
        *("${oc.env:SECRET}", "x${oc.env:SECRET}", "${oc.decode:${oc.env:SECRET}}", "${oc.create:[a]}", "${own:1}"),
        *(
            "${a.${oc.env:SECRET}}",
            r"\\${oc.env:SECRET}",
            r"\${oc.env:SECRET}",
            r"\${trainer.seed}",
            "${hydra:job.name}",
        ),
    ],
)
def test_settings_of_words_files_and_saved_runs_call_no_function(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their values would stand in config.yaml, report.html and trackers."""
    monkeypatch.setenv("SECRET", "of the user")
    OmegaConf.register_new_resolver("own", lambda _: pytest.fail("it ran"), replace=True)
    wanted = "expected a value, or references to other keys alone, such as ${trainer.seed}"
    file = tmp_path / "mine.yaml"
    for key, held in (("trainer.project_name", value), ("reward.fn", [value]), ("agent.args", {"a": {"b": [value]}})):
        group, name = key.split(".")
        file.write_text(yaml.safe_dump({group: {name: held}}))
        told = refusals(f"recipe={file}")
        assert len(told) == 1 and told[0].startswith(key) and told[0].endswith(wanted)
        assert "of the user" not in told[0]
        with pytest.raises(ConfigError, match=re.escape(wanted)):
            read_yaml(file)
    assert refusal(f"trainer.project_name='{value}'").endswith(wanted)


def test_what_is_written_of_settings_has_references_as_their_values() -> None:
    config, _ = load_config(["recipe=quickstart", "trainer.project_name='of seed ${trainer.seed}'", "data.seed=7"])
    assert config.trainer.project_name == f"of seed {config.trainer.seed}"
    dashed = ["teachers.a-b.model.path=/x", "model.path='${teachers.a-b.model.path}'"]
    assert load_config(["recipe=quickstart", *dashed])[0].model.path == "/x"
    assert "${" not in to_yaml(config) and "oc." not in to_yaml(config)


@pytest.mark.parametrize("name", ["a;b", "a\nb", "a\x1b[2Jb", "a\u202eb", "$(a)", "`a`", "a>b", "a\\b"])
def test_terminal_text_the_name_of_a_run_is_no_command(name: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({"recipe": "quickstart", "trainer": {"experiment_name": name}}))
    told = refusals(f"recipe={file}")
    assert len(told) == 1 and "expected the plain name of a folder, printable and without ! " in told[0]
