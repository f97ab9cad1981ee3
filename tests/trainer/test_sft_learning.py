"""Supervised training: what tells that nothing was learnt, its learning rate, the model of a very small preset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config import load_config
from megarl.trainer.build import make_mini_model, model_folder
from megarl.trainer.sft import hardly_moved

WORDS = ("sft.train_files=[a.jsonl]", "model.path=m")


def series(*losses: float, held_out: tuple[float, ...] = ()) -> dict[str, tuple[list[int], list[float]]]:
    found = {"sft/loss": (list(range(len(losses))), list(losses))}
    return found | ({"val/loss": (list(range(len(held_out))), list(held_out))} if held_out else {})


def test_a_loss_that_has_not_moved_is_told_with_the_learning_rate() -> None:
    told = hardly_moved(series(*[4.0] * 5, *[3.0, 4.8, 3.9, 4.1, 3.95]), 1e-6)  # means 4.0 and 3.95
    assert told.startswith("sft/loss was 4.0000 at first and is 3.9500 now: the model has learnt nothing")
    assert "actor.optim.lr (it was 1e-06)" in told
    assert hardly_moved(series(*[4.0] * 5, *[3.9] * 5), 1e-6) == ""
    assert hardly_moved(series(*[4.0] * 9), 1e-6) == "", "too few steps to tell"
    assert hardly_moved(series(*[0.04] * 10), 1e-6) == "", "it knew the examples before"


def test_held_out_examples_say_it_before_the_trained_ones() -> None:
    learnt_by_heart = [4.0] * 5 + [1.0] * 5
    assert hardly_moved(series(*learnt_by_heart, held_out=(4.0, 4.5)), 1e-6).startswith("val/loss was 4.0000 at first")
    assert hardly_moved(series(*learnt_by_heart, held_out=(4.0, 3.0)), 1e-6) == ""


def test_the_learning_rate_fits_the_width_unless_it_is_set() -> None:
    config, _ = load_config([*WORDS, "model.config={hidden_size:3584}"], command="sft")
    assert config.actor.optim.lr == 1.4e-5, "0.05 / 3584"
    assert load_config([*WORDS, "actor.optim.lr=1e-6"], command="sft")[0].actor.optim.lr == 1e-6
    assert load_config(list(WORDS), command="sft")[0].actor.optim.lr == 2e-5, "of a hub's model nothing is known yet"
    assert load_config(["data.train_files=[a]", "model.path=m"])[0].actor.optim.lr == 1e-6


def test_the_folder_of_a_very_small_preset_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["sft.train_files=[a.jsonl]", "model=qwen3_mini"]
    config, _ = load_config(words, command="sft")
    make_mini_model(config)
    assert capsys.readouterr().err.startswith("warning: model.path=runs/models/qwen3_mini: this model of random ")
    found = json.loads((tmp_path / "runs/models/qwen3_mini/config.json").read_text())
    assert (found["hidden_size"], found["vocab_size"], found["model_type"]) == (64, 256, "qwen3")
    make_mini_model(load_config(words, command="sft")[0])  # the folder is checked against the preset
    assert capsys.readouterr().err == ""


def test_no_hub_is_asked_for_what_can_only_be_a_folder() -> None:
    with pytest.raises(ValueError, match=r"^model.path=runs/models/mine: no such folder; expected a folder with a con"):
        model_folder("runs/models/mine")
