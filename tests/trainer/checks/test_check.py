"""`trainer.check_only` says everything that would stop a run, at once, and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from ring_cases import make_parts, settings

from megarl.cli import main

CHECK = "trainer.check_only=true"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("parts"))


def test_what_was_looked_at_is_told_and_nothing_is_written(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *settings(parts, tmp_path, "fine", CHECK)]) == 0
    told = capsys.readouterr().out
    assert f"model.path={parts}/model: " in told
    assert f"data.val_files=[{parts}/data/test.jsonl]: 20 prompts of up to 6 tokens" in told
    assert "rewards: tried on 8 rows" in told
    assert "old log-probs: of the forward pass of the first optimizer step, checked by a pass " in told
    assert told.endswith("nothing was found that would stop this run\n")
    assert not list(tmp_path.iterdir())


def test_a_reward_is_tried(parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, completion):\n    raise KeyError('no such unit')\n")
    words = ["algorithm.adv_estimator=grpo", f"reward.fn={tmp_path}/mine.py:score", CHECK]
    assert main(["train", *settings(parts, tmp_path, "raises", *words)]) == 2
    (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert told.startswith(f"error: reward.fn={tmp_path}/mine.py:score: tried on {parts}/data/train.jsonl:1 with the ")


def test_all_faults_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = make_parts(tmp_path / "parts")
    (broken / "model" / "model.safetensors").unlink()
    (broken / "data" / "test.jsonl").write_text('{"question": 3}\n')
    (broken / "loss.py").write_text("import no_such_module\n")
    words = [f"algorithm.plugins=[{broken}/loss.py]", CHECK]
    assert main(["train", *settings(broken, tmp_path, "broken", *words)]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert told[0].startswith(f"error: algorithm.plugins has '{broken}/loss.py', whose imports fail: No module named")
    assert told[1].startswith(f"error: {broken}/model holds neither model.safetensors nor ")
    assert told[2].startswith(f"error: {broken}/data/test.jsonl:1: no prompt; expected the key 'prompt'")
    assert len(told) == 3


@pytest.mark.parametrize("word", ["actor.clip_ration=0.1", "actor.strategy=fsdp"])
def test_faults_of_settings_and_of_files_are_told_in_one_go(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    (tmp_path / "broken.jsonl").write_text("{\n")
    files = [f"data.train_files=[{tmp_path}/broken.jsonl]", f"data.val_files=[{tmp_path}/missing.jsonl]"]
    words = [*files, f"reward.fn={tmp_path}/gone.py:score", f"algorithm.plugins=[{tmp_path}/no_plugin.py]"]
    words += ["actor.lora.rank=8", "actor.strategy=fsdp", "trainer.n_gpus_per_node=2", word, CHECK]
    assert main(["train", *settings(parts, tmp_path, "many", *words)]) == 2
    told = [line.removeprefix("error: ") for line in capsys.readouterr().err.splitlines() if "error: " in line]
    first = ["actor.clip_ration=0.1: there is no key"] if "ration" in word else []
    wanted = [
        *first,
        "actor.strategy=fsdp: actor.lora.rank=8 trains adapters only",
        f"algorithm.plugins has '{tmp_path}/no_plugin.py'",
        f"{tmp_path}/missing.jsonl: no such file or folder",
        f"{tmp_path}/broken.jsonl:1: not JSON",
        f"reward.fn={tmp_path}/gone.py:score: expected a file that exists",
    ]
    assert len(told) == len(wanted), told
    for sentence in wanted:
        assert any(said.startswith(sentence) for said in told), (sentence, told)


def test_what_a_refused_word_would_have_said_of_data_models_and_rewards_is_not_looked_at(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.jsonl").write_text('{"ask": "1+1=", "ground_truth": "2"}\n')
    words = ["data.promt_key=ask", f"data.train_files=[{tmp_path}/odd.jsonl]", "data.max_prompt_length=none", CHECK]
    assert main(["train", *settings(parts, tmp_path, "odd", *words)]) == 2
    told = [line.partition(":")[2].strip() for line in capsys.readouterr().err.splitlines()]
    assert [sentence.partition(":")[0] for sentence in told] == ["data.promt_key=ask", "data.max_prompt_length=none"]
    words = [
        "model.path=",
        "model.tokenizer_path=",
        "reward.fm=exact",
        f"data.val_files=[{tmp_path}/none.jsonl]",
        CHECK,
    ]
    assert main(["train", *settings(parts, tmp_path, "odd", *words)]) == 2
    told = [line.removeprefix("error: ") for line in capsys.readouterr().err.splitlines()]
    assert any(sentence.startswith("reward.fm=exact: there is no key") for sentence in told)
    assert any(sentence.startswith(f"{tmp_path}/none.jsonl: no such file") for sentence in told)
    assert not any(sentence.startswith("reward.fn") for sentence in told)


def test_of_a_recipe_that_makes_its_model_first_is_told_what_and_the_rest_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "recipe=quickstart", CHECK]) == 0
    told = capsys.readouterr().out
    assert (
        "trainer.prepare=megarl.trainer.recipes.quickstart: the run calls it first, to make what is not here: "
        "model.path=runs/quickstart_sft/hf, runs/quickstart_data/train.jsonl, runs/quickstart_data/test.jsonl\n"
    ) in told
    assert told.endswith("nothing was found that would stop this run\n")
    assert not list(tmp_path.iterdir())
    (tmp_path / "val.jsonl").write_text("{\n")
    words = ["trainer.prepare=megarl.train", "data.val_files=[val.jsonl]", "reward.fn=gone.py:score",
             "algorithm.plugins=[no_plugin.py]"]  # fmt: skip
    assert main(["train", "recipe=quickstart", *words[:3], CHECK]) == 2
    told = [line.removeprefix("error: ") for line in capsys.readouterr().err.splitlines()]
    assert told[0].startswith("reward.fn=gone.py:score: expected a file that exists")
    assert told[1].startswith("val.jsonl:1: not JSON")
    assert main(["train", "recipe=quickstart", "trainer.prepare=megarl.nothing", words[3], CHECK]) == 2
    told = [line.removeprefix("error: ") for line in capsys.readouterr().err.splitlines()]
    assert told[0].startswith("algorithm.plugins has 'no_plugin.py'")
    assert told[1].startswith("trainer.prepare=megarl.nothing: ")


def test_a_missing_file_hides_no_fault_of_the_others_and_none_of_the_rewards(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, completion):\n    raise KeyError('no such unit')\n")
    words = ["algorithm.adv_estimator=grpo", f"reward.fn={tmp_path}/mine.py:score", CHECK]
    words += [f"data.train_files=[{tmp_path}/missing.jsonl]"]
    assert main(["train", *settings(parts, tmp_path, "missing", *words)]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(told) == 2
    assert "missing.jsonl" in told[0]
    assert told[1].startswith(
        f"error: reward.fn={tmp_path}/mine.py:score: tried on {parts}/data/test.jsonl:1 with the "
    )


def test_a_model_that_is_only_a_name_yet_is_no_fault(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model.path=nobody/nothing", "model.tokenizer_path=nobody/nothing", CHECK]
    assert main(["train", *settings(parts, tmp_path, "named", *words)]) == 0
    told = capsys.readouterr().out
    assert (
        "model.path=nobody/nothing: its config.json is not on this machine; layout and memory were not planned" in told
    )
    assert (
        "model.path=nobody/nothing: no folder here, and no hub name that was downloaded before; the run asks the hub, "
        "this did not\n" in told
    )


def test_a_mistyped_folder_is_told_and_a_name_of_the_hub_is_not_refused_for_being_like_one(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(parts / "model")
    monkeypatch.chdir(tmp_path)
    words = ["model.path=modles/tiny", f"model.tokenizer_path={parts}/model", CHECK]
    assert main(["train", *settings(parts, tmp_path, "mistyped", *words)]) == 0
    assert "this did not (if it is to be a folder: did you mean models/tiny?)\n" in capsys.readouterr().out


def test_a_run_that_belongs_to_another_machine_is_laid_out_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "model=qwen2_5_7b", "layout=8x80", "data.train_files=[my_data.jsonl]", CHECK]) == 0
    assert "data and models of this run are not on this machine: they were not looked at" in capsys.readouterr().out
