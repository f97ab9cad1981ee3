"""`megarl dpo` and `megarl rm`: what they measure, their models, a training that is struck, and PPO with the model."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ring_cases import make_parts, settings, steps
from safetensors.torch import load_file
from strikes import lives, start, weights
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from megarl.cli import main
from megarl.hf_server.scoring import ScoreModel

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of sums, of which the rejected one has no digits: a preference that two layers learn in a few steps.

    The model pads with the token that ends a text, as many do.
    """
    folder = make_parts(tmp_path_factory.mktemp("parts"))
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps(config | {"pad_token_id": config["eos_token_id"]}))
    rng = random.Random(0)
    rows = [
        {
            "prompt": f"{a}+{b}=",
            "chosen": "".join(rng.choices("0123456789", k=rng.randint(1, 4))),
            "rejected": "".join(rng.choices("abcdefghij", k=rng.randint(1, 4))),
        }
        for a in range(10, 30)
        for b in range(10, 13)
    ]
    rng.shuffle(rows)
    for name, some in (("pairs", rows[:45]), ("held_out", rows[45:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return folder


def words_of(parts: Path, runs: Path, name: str, *more: str) -> list[str]:
    return [
        *(f"sft.train_files=[{parts}/pairs.jsonl]", f"sft.val_files=[{parts}/held_out.jsonl]"),
        *("trainer.test_freq=2", "sft.batch_size=8", "sft.max_length=32", "trainer.total_training_steps=5"),
        *(f"model.path={parts}/model", "actor.optim.lr=1e-3"),
        *("trainer.device=cpu", "trainer.n_gpus_per_node=2", "actor.megatron.tensor_model_parallel_size=2"),
        *(f"trainer.default_local_dir={runs}", f"trainer.experiment_name={name}", *more),
    ]


def held_out(parts: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (parts / "held_out.jsonl").read_text().splitlines()]


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


@torch.inference_mode()
def answer_log_prob(folder: Path, prompt: str, answer: str) -> float:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked, said = tokenizer(prompt)["input_ids"], [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    log_probs = model(torch.tensor([asked + said])).logits[0].log_softmax(-1)
    return sum(float(log_probs[len(asked) - 1 + at, token]) for at, token in enumerate(said))


def test_dpo_measures_what_its_model_says_and_prefers_against_the_one_at_the_start(parts: Path, tmp_path: Path) -> None:
    assert main(["dpo", *words_of(parts, tmp_path, "dpo", "dpo.beta=0.3")]) == 0
    run = tmp_path / "dpo"
    assert sorted(steps(run, "val/loss")) == [0, 2, 4, 5]
    assert steps(run, "val/loss")[0] == pytest.approx(0.6931472, abs=1e-6)
    assert steps(run, "val/accuracy")[0] == 0.5
    rewards = [
        [
            0.3
            * (
                answer_log_prob(run / "hf", row["prompt"], row[name])
                - answer_log_prob(parts / "model", row["prompt"], row[name])
            )
            for name in ("chosen", "rejected")
        ]
        for row in held_out(parts)
    ]
    assert steps(run, "val/chosen")[5] == pytest.approx(sum(one for one, _ in rewards) / len(rewards), abs=1e-4)
    assert steps(run, "val/margin")[5] == pytest.approx(sum(a - b for a, b in rewards) / len(rewards), abs=1e-4)
    assert steps(run, "val/accuracy")[5] == sum(a > b for a, b in rewards) / len(rewards)
    assert steps(run, "dpo/loss")[5] < steps(run, "dpo/loss")[1] == pytest.approx(0.6931472, abs=1e-6)
    assert json.loads((run / "summary.json").read_text())["val_accuracy"] == steps(run, "val/accuracy")[5]


@pytest.mark.full
@pytest.mark.parametrize("command", ["dpo", "rm"])
def test_a_training_on_pairs_that_is_struck_is_the_same_to_the_bit(parts: Path, tmp_path: Path, command: str) -> None:
    log, file, more = tmp_path / "log", tmp_path / "strikes.json", ("trainer.save_freq=2",)
    assert start(command, words_of(parts, tmp_path, "whole", *more), [], file, log) == 0, log.read_text()
    plan = [(2, "update", "rank"), (3, "update", "SIGTERM"), (5, "update", "rank")]
    assert lives(command, words_of(parts, tmp_path, "struck", *more), plan, file, log) == [143, 0]
    for metric in (f"{command}/loss", f"{command}/accuracy", "val/loss", "val/margin"):
        assert steps(tmp_path / "struck", metric) == steps(tmp_path / "whole", metric)
    assert weights(tmp_path / "struck") == weights(tmp_path / "whole")


def test_a_save_of_another_command_is_refused(parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("trainer.save_freq=1", "trainer.total_training_steps=1", "trainer.test_freq=-1")
    assert main(["rm", *words_of(parts, tmp_path, "one", *more)]) == 0
    capsys.readouterr()
    assert main(["dpo", *words_of(parts, tmp_path, "one", *more)]) == 2
    assert "is not of `megarl dpo`; expected one that is" in capsys.readouterr().err


def test_a_pair_that_is_larger_than_a_micro_batch_is_refused_with_its_place(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(
        parts, tmp_path, "small", "sft.max_length=16", "actor.ppo_max_token_len_per_gpu=20", "trainer.check_only=true"
    )
    assert main(["dpo", *words]) == 2
    said = capsys.readouterr().err
    assert re.search(r"ppo_max_token_len_per_gpu=20: both answers of a pair .* have 2\d tokens", said), said


def test_dpo_trains_adapters_and_goes_on_only_from_the_model_it_began_with(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in (parts / "pairs.jsonl").read_text().splitlines()]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row | {"margin": 1.0}) + "\n" for row in rows))
    more = ("actor.lora.rank=2", "actor.lora.alpha=4", "trainer.save_freq=1", "trainer.total_training_steps=2")
    words = [*words_of(parts, tmp_path, "lora", *more), f"sft.train_files=[{tmp_path}/pairs.jsonl]"]
    assert main(["dpo", *words]) == 0
    assert "45 rows have a margin, which `megarl rm` reads and `megarl dpo` does not" in capsys.readouterr().err
    before, after = weights_in(parts / "model"), weights_in(tmp_path / "lora/hf")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.endswith("_proj.weight") for name in changed)
    ranks = {int(torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3)) for name in changed}
    assert max(ranks) <= 2
    shutil.copytree(parts / "model", tmp_path / "other")
    more = (*words, f"model.path={tmp_path}/other", "trainer.total_training_steps=3")
    assert main(["dpo", *more]) == 2
    assert "is compared with the model that it began with" in capsys.readouterr().err
    assert main(["rm", *words]) == 2
    assert "actor.lora.rank=2: `megarl rm` trains all weights and a new head" in capsys.readouterr().err


@pytest.mark.full
def test_a_reward_model_of_ours_is_right_of_held_out_pairs_loads_everywhere_and_pays_in_a_ppo_run_that_learns(
    parts: Path, tmp_path: Path
) -> None:
    more = ("actor.optim.lr=3e-3", "trainer.total_training_steps=30", "trainer.test_freq=30")
    assert main(["rm", *words_of(parts, tmp_path, "rm", *more)]) == 0
    run = tmp_path / "rm"
    accuracy = steps(run, "val/accuracy")
    assert accuracy[0] == 0.5 and accuracy[30] >= 0.95
    folder = run / "hf"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and len(config["id2label"]) == 1
    names = load_file(folder / "model.safetensors").keys()
    assert "score.weight" in names and "lm_head.weight" not in names

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, found = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"] and model.num_labels == 1
    scores = {"chosen": 0.0, "rejected": 0.0}
    for row in (rows := held_out(parts)):
        for name in scores:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[name]}],
                tokenize=False,
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            score = model.eval()(torch.tensor([ids])).logits.item()
            assert ScoreModel(str(folder), torch.float32).scores([ids])[0] == pytest.approx([score], abs=1e-5)
            scores[name] += score / len(rows)
    for name, score in scores.items():
        assert steps(run, f"val/{name}")[30] == pytest.approx(score, abs=1e-4)

    ppo = settings(parts, tmp_path, "ppo", "reward.fn=[model]", f"reward.model.path={folder}", "rollout.n=8")
    ppo += ["algorithm.adv_estimator=gae", "data.train_batch_size=16", "rollout.val_kwargs.temperature=1"]
    ppo += ["critic.optim.lr=3e-3", "critic.cliprange_value=null", "actor.optim.lr=3e-3"]
    ppo += [
        "trainer.total_training_steps=25",
        "trainer.test_freq=25",
        f"reward.audit={parts}/digits.py:share_of_digits",
    ]
    assert main(["train", *ppo]) == 0
    score = steps(tmp_path / "ppo", "val/score")
    assert score[25] > score[0] + 1.0, score
