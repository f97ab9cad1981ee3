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
