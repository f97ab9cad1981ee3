"""`megarl sft`: a stage that is struck gives the same weights to the bit; its learning rate; and whether it learnt."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ring_cases import lines, make_parts, steps
from saved_runs import save, saver_of
from small_disk import resize, small_disk
from strikes import lives, start, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.cli import main
from megarl.config import load_config
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.trainer.stage import hardly_moved

pytestmark = pytest.mark.dist


def words_of(parts: Path, runs: Path, name: str) -> list[str]:
    return [
        f"sft.train_files=[{parts}/examples.jsonl]",
        f"sft.val_files=[{parts}/held_out.jsonl]",
        "trainer.test_freq=2",
        *("sft.batch_size=8", "sft.max_length=24", "trainer.total_training_steps=5"),  # the epoch has three
        f"model.path={parts}/model",
        "actor.megatron.tensor_model_parallel_size=2",
        *("actor.optim.lr=1e-3", "actor.optim.lr_warmup_steps=2", "actor.optim.lr_decay_style=cosine"),
        *("trainer.device=cpu", "trainer.n_gpus_per_node=2"),
        *(f"trainer.default_local_dir={runs}", f"trainer.experiment_name={name}"),
        *("trainer.save_freq=2", "trainer.max_checkpoints_to_keep=9"),
    ]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_parts(tmp_path_factory.mktemp("parts"))
    rows = [{"prompt": f"{a}+{a + 1}=", "response": str(2 * a + 1)} for a in range(10, 34)]
    (folder / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"prompt": f"{a}+{a}=", "response": str(2 * a)} for a in (10, 31, 32)]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@torch.inference_mode()
def plain_loss(folder: Path, rows: list[dict[str, str]]) -> float:
    """-log p of the answers and their ends by transformers, one example at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses: list[float] = []
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["response"])["input_ids"], tokenizer.eos_token_id]
        log_probs = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        losses += [-float(log_probs[len(prompt) - 1 + at, token]) for at, token in enumerate(answer)]
    return sum(losses) / len(losses)


@pytest.mark.full
def test_full_disk_at_the_first_save_and_at_the_export_holds_a_stage_until_there_is_room(
    parts: Path, tmp_path: Path
) -> None:
    run, log = tmp_path / "sft", tmp_path / "sft.log"
    command = [sys.executable, "-m", "megarl", "sft", *words_of(parts, tmp_path, "sft"), "trainer.async_save=false"]
    with small_disk(run / "checkpoints", "16k") as saves, small_disk(run / "hf", "16k") as hf, log.open("wb") as out:
        with subprocess.Popen(command, stdout=out, stderr=out) as process:
            for disk in (saves, hf):
                while f"warning: {disk}: " not in log.read_text():
                    assert process.poll() is None, log.read_text()
                    time.sleep(0.1)
                resize(disk, "64m")
        assert process.returncode == 0, log.read_text()
        assert (hf / "config.json").is_file() and "started again" not in log.read_text()
    assert re.findall(r"step (\d)/5  loss", log.read_text()) == list("12345")


@pytest.mark.full
def test_a_stage_that_is_struck_is_the_same_to_the_bit(parts: Path, tmp_path: Path) -> None:
    log, file = tmp_path / "sft.log", tmp_path / "strikes.json"
    assert start("sft", words_of(parts, tmp_path, "whole"), [], file, log) == 0, log.read_text()
    # What is saved after step 4 is saved in the stages of step 5.
    plan = [
        (1, "update", "rank"),  # before there is a save
        (1, "update", "SIGUSR1"),
        (3, "update", "SIGTERM"),
        (5, "save_checkpoint", "all"),
        (5, "update", "rank"),
    ]
    assert lives("sft", words_of(parts, tmp_path, "struck"), plan, file, log) == [143, -9, 0]
    assert log.read_text().count("the ranks are started again (1 of 3 without a new step)") == 2
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    held_out = [json.loads(line) for line in (parts / "held_out.jsonl").read_text().splitlines()]
    evaluated = steps(whole, "val/loss")
    assert sorted(evaluated) == [0, 2, 4, 5]
    assert evaluated[0] == pytest.approx(plain_loss(parts / "model", held_out), rel=1e-5)
    assert evaluated[5] == pytest.approx(plain_loss(whole / "hf", held_out), rel=1e-5)
    assert json.loads((whole / "summary.json").read_text())["val_loss"] == evaluated[5]
    for metric in ("sft/loss", "sft/grad_norm", "sft/lr", "val/loss"):
        assert steps(struck, metric) == steps(whole, metric)
    assert len([row for row in lines(struck / "metrics.jsonl") if "sft/loss" in row]) == 5
    assert weights(struck) == weights(whole)
    saved = sorted(folder.name for folder in (struck / "checkpoints").glob("step_*"))
    assert saved == [f"step_{step:08d}" for step in (1, 2, 3, 4, 5)], "by SIGUSR1 after step 1, by SIGTERM after 3"
    assert json.loads((struck / "summary.json").read_text())["loss"] == steps(struck, "sft/loss")[5]


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"ledger": {}, "kl": {}}, "is not of `megarl sft`; expected one that is"),
        ({"examples": {}, "loss": 1.0, "wall_s": 2.0}, "was saved by an older megarl (its state has no spikes)"),
    ],
)
def test_a_checkpoint_that_it_cannot_go_on_from_is_one_sentence(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], state: dict[str, Any], named: str
) -> None:
    folder = tmp_path / "other" / "checkpoints"
    save(saver_of(folder), 3, state)
    assert main(["sft", *words_of(parts, tmp_path, "other")]) == 2
    faults = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(faults) == 1
    assert faults[0].startswith(f"error: trainer.resume_mode: {folder}/step_00000003 {named}")


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
    # Held-out examples say it before the trained ones.
    learnt_by_heart = [4.0] * 5 + [1.0] * 5
    assert hardly_moved(series(*learnt_by_heart, held_out=(4.0, 4.5)), 1e-6).startswith("val/loss was 4.0000 at first")
    assert hardly_moved(series(*learnt_by_heart, held_out=(4.0, 3.0)), 1e-6) == ""


@pytest.mark.parametrize("stage", ["dpo", "rm"])
def test_pairs_are_judged_by_their_order_as_the_loss_rises_again_when_it_overfits(stage: str) -> None:
    def told(*accuracies: float, held_out: tuple[float, ...] = ()) -> str:
        numbers = {f"{stage}/loss": [0.7] * 10, f"{stage}/accuracy": accuracies, "val/accuracy": held_out}
        numbers |= {"val/loss": (0.693, 0.9)}
        return hardly_moved({name: (list(range(len(of))), list(of)) for name, of in numbers.items()}, 1e-6, stage)

    assert told(*[0.5] * 10, held_out=(0.5, 0.7)) == told(*[0.5] * 5, *[0.7] * 5) == ""
    assert told(*[0.9] * 10, held_out=(0.9, 0.9)) == "", "it knew the pairs before"
    by_heart = told(*[0.5] * 5, *[1.0] * 5, held_out=(0.5, 0.51))
    assert by_heart.startswith("val/accuracy was 0.5000 at first and is 0.5100 now: the model has learnt nothing")
    assert told(*[0.5] * 10).startswith(f"{stage}/accuracy was 0.5000")


def test_sft_spans_of_a_run_end_where_its_model_stops_and_hold_its_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base model: its chat template ends turns with another token than its end of text."""
    folder = write_tiny_model(tmp_path / "model", TinySizes(hidden=32, layers=1, ffn=32))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}<user>{{ m.content }}<system>{% endfor %}"
    tokenizer.save_pretrained(folder)
    row = {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    words = [f"sft.train_files=[{tmp_path}/a.jsonl]", f"model.path={folder}", "sft.max_length=64"]
    words += [f"trainer.default_local_dir={tmp_path}/runs", "trainer.device=cpu", "trainer.n_gpus_per_node=1"]
    assert main(["sft", *words]) == 2, "one row is no batch"
    said = " ".join(capsys.readouterr())
    assert "a.jsonl]: 1 rows are 1 sequences with 3 learnt tokens" in said  # <user> is no header: it is learnt
    assert "the chat template ends answers with <system>, at which servers of model.path=" in said
    stops = {"eos_token_id": [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<system>")]}
    (folder / "generation_config.json").write_text(json.dumps(stops))
    tokenizer.add_tokens(["ß"])
    tokenizer.save_pretrained(folder)
    assert main(["sft", *words]) == 2
    assert "ends answers with" not in " ".join(capsys.readouterr())
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "ß1", "response": "2"}))
    assert main(["sft", *words]) == 2
    assert re.search(
        r"error: .*a.jsonl:1: it holds the token 'ß', whose id is (\d+), and the model has \1 \(",
        capsys.readouterr().err,
    )


def test_the_learning_rate_fits_the_width_unless_it_is_set() -> None:
    config, _ = load_config([*WORDS, "model.config={hidden_size:3584}"], command="sft")
    assert config.actor.optim.lr == 1.4e-5, "0.05 / 3584"
    assert load_config([*WORDS, "actor.optim.lr=1e-6"], command="sft")[0].actor.optim.lr == 1e-6
    assert load_config(list(WORDS), command="sft")[0].actor.optim.lr == 2e-5, "of a hub's model nothing is known yet"
    assert load_config(["data.train_files=[a]", "model.path=m"])[0].actor.optim.lr == 1e-6
