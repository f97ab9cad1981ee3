"""`trainer.check_only` refuses what the command itself refuses, in the same words: spoilt folders, files, settings."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ring_cases import make_parts, settings
from safetensors.torch import load_file, save_file

from megarl.cli import main

pytestmark = pytest.mark.dist

Spoil = Callable[[Path], None]


def config(**fields: object) -> Spoil:
    """Fields of config.json."""

    def spoil(parts: Path) -> None:
        file = parts / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return spoil


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Spoil:
    """All tensors of the model."""

    def spoil(parts: Path) -> None:
        file = parts / "model" / "model.safetensors"
        save_file({name: tensor.clone() for name, tensor in change(load_file(file)).items()}, file)

    return spoil


def written(name: str, text: str) -> Spoil:
    """A file of this text."""
    return lambda parts: (parts / name).write_text(text) and None


def cut(name: str) -> Spoil:
    """The first half of a file."""

    def spoil(parts: Path) -> None:
        whole = (parts / name).read_bytes()
        (parts / name).write_bytes(whole[: len(whole) // 2])

    return spoil


def gone(name: str) -> Spoil:
    return lambda parts: (parts / name).unlink()


def nothing(parts: Path) -> None:
    """The settings alone are wrong."""


DOWN, NORM = "model.layers.1.mlp.down_proj.weight", "model.norm.weight"


def filled(name: str, number: float) -> Spoil:
    return weights(lambda held: held | {name: torch.full_like(held[name], number)})


def without(name: str) -> Spoil:
    return weights(lambda held: {other: tensor for other, tensor in held.items() if other != name})


def tied_to_another_head(parts: Path) -> None:
    config(tie_word_embeddings=True)(parts)
    weights(lambda held: held | {"lm_head.weight": held["model.embed_tokens.weight"] + 1})(parts)


def fewer_rows(parts: Path) -> None:
    """An embedding that lacks the tokenizer's last tokens."""
    config(vocab_size=20)(parts)
    cut_rows = ("model.embed_tokens.weight", "lm_head.weight")
    weights(lambda held: {n: t[:20] if n in cut_rows else t for n, t in held.items()})(parts)


def other_tokens(parts: Path) -> None:
    """A second model whose tokenizer has another token."""
    shutil.copytree(parts / "model", parts / "other")
    file = parts / "other" / "tokenizer.json"
    found = json.loads(file.read_text())
    vocab = found["model"]["vocab"]
    last = max(vocab, key=lambda word: vocab[word])
    vocab[f"{last}{last}"] = vocab.pop(last)
    file.write_text(json.dumps(found))


def refusing_template(parts: Path) -> None:
    text = "{% for m in messages %}{{ raise_exception('no such role') }}{% endfor %}"
    written("model/chat_template.jinja", text)(parts)
    rows = '{"messages": [{"role": "user", "content": "1+1="}], "ground_truth": "2"}\n' * 4
    written("data/train.jsonl", rows)(parts)


PPO = "algorithm.adv_estimator=gae"
ROW = '{"prompt": "1+1=", "ground_truth": "2"}\n'
CASES: dict[str, tuple[str, Spoil, list[str]]] = {
    "rope of a kind that is not computed": ("train", config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), []),
    "windows": ("train", config(use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention"] * 2), []),
    "another activation": ("train", config(hidden_act="gelu"), []),
    "another family": ("train", config(model_type="gpt2"), []),
    "quantized": ("train", config(quantization_config={"quant_method": "fp8"}), []),
    "a tensor is missing": ("train", without(DOWN), []),
    "a norm is missing": ("train", without(NORM), []),
    "a tensor too many": ("train", weights(lambda held: held | {"model.more.weight": torch.ones(3)}), []),
    "a tensor of another shape": ("train", weights(lambda held: held | {DOWN: held[DOWN].T.contiguous()}), []),
    "config.json of another size": ("train", config(intermediate_size=48), []),
    "not a number": ("train", filled(NORM, float("nan")), []),
    "infinite": ("train", filled(DOWN, float("inf")), []),
    "a file that was cut": ("train", cut("model/model.safetensors"), []),
    "no weights": ("train", gone("model/model.safetensors"), []),
    "an index of files that are not there": (
        "train",
        written("model/model.safetensors.index.json", '{"metadata": {}, "weight_map": {"a": "absent.safetensors"}}'),
        [],
    ),
    "another file of weights": ("train", config(transformers_weights="other.safetensors"), []),
    "an adapter beside the weights": ("train", written("model/adapter_config.json", "{}"), []),
    "a tensor under two names": (
        "train",
        weights(lambda held: held | {DOWN.removeprefix("model."): held[DOWN] + 1}),
        [],
    ),
    "evaluate: a tensor under two names": (
        "evaluate",
        weights(lambda held: held | {DOWN.removeprefix("model."): held[DOWN] + 1}),
        [],
    ),
    "tied to another head": ("train", tied_to_another_head, []),
    "fewer rows than tokens": ("train", fewer_rows, []),
    "no tokenizer": ("train", gone("model/tokenizer.json"), []),
    "no config.json": ("train", gone("model/config.json"), []),
    "a config.json that is none": ("train", written("model/config.json", "{"), []),
    "heads that a layout does not divide": ("train", nothing, ["actor.megatron.tensor_model_parallel_size=3"]),
    "no critic": ("train", nothing, [PPO, "critic.model.path=./absent"]),
    "a warm-up without end": ("train", nothing, [PPO, "trainer.critic_warmup=3"]),
    "a profile of no step": ("train", nothing, ["trainer.profile.steps=[7]"]),
    "no folder to resume": ("train", nothing, ["trainer.resume_mode=./absent"]),
    "a batch larger than an epoch": (
        "train",
        written("data/train.jsonl", ROW),
        ["trainer.total_training_steps=null", "trainer.total_epochs=1"],
    ),
    "a row without a prompt": ("train", written("data/train.jsonl", '{"question": 3}\n'), []),
    "a file that is no JSON": ("train", written("data/test.jsonl", "{\n"), []),
    "a file that is not there": ("train", gone("data/test.jsonl"), []),
    "a prompt that is too long": ("train", nothing, ["data.max_prompt_length=4"]),
    "a template that refuses": ("train", refusing_template, []),
    "no ground truth": ("train", written("data/train.jsonl", '{"prompt": "1+1="}\n'), ["reward.fn=exact"]),
    "no reward": ("train", nothing, ["reward.fn=gone.py:score"]),
    "a reward that raises": (
        "train",
        written("digits.py", "def share_of_digits(prompt, completion):\n    1 / 0\n"),
        [],
    ),
    "a reward that returns text": (
        "train",
        written("digits.py", "def share_of_digits(prompt, completion):\n    return 'much'\n"),
        [],
    ),
    "a plug-in that fails": (
        "train",
        written("loss.py", "import no_such_module\n"),
        ["algorithm.plugins=[PARTS/loss.py]"],
    ),
    "a buffer without a length": ("train", nothing, ["algorithm.overlong_buffer.enable=true"]),
    "a teacher of other tokens": ("train", other_tokens, ["teachers.t.model.path=PARTS/other"]),
    "no agent": ("train", nothing, ["agent.fn=gone.py:episode"]),
    "sft: no rows": ("sft", written("data/sft.jsonl", ""), []),
    "sft: no response": ("sft", written("data/sft.jsonl", '{"prompt": "1+1="}\n'), []),
    "sft: an example that is too long": ("sft", nothing, ["sft.max_length=4"]),
    "sft: a batch larger than an epoch": ("sft", nothing, ["sft.batch_size=64", "trainer.total_training_steps=null"]),
    "sft: a tensor is missing": ("sft", without(DOWN), []),
    "sft: not a number": ("sft", filled(DOWN, float("nan")), []),
    "sft: windows": (
        "sft",
        config(use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention"] * 2),
        [],
    ),
    "evaluate: a row without a prompt": ("evaluate", written("data/test.jsonl", '{"question": 3}\n'), []),
    "evaluate: a reward that raises": (
        "evaluate",
        written("digits.py", "def share_of_digits(prompt, completion):\n    1 / 0\n"),
        [],
    ),
    "evaluate: a tensor is missing": ("evaluate", without(DOWN), []),
    "evaluate: fewer rows than tokens": ("evaluate", fewer_rows, []),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("good"))


def words_of(command: str, parts: Path, runs: Path) -> list[str]:
    words = [*settings(parts, runs, "spoilt"), "rollout.engine=hf"]
    if command == "sft":
        kept = ("model.", "actor.", "trainer.")
        return [word for word in words if word.startswith(kept)] + [f"sft.train_files=[{parts}/data/sft.jsonl]"]
    if command == "evaluate":
        left = ("data.train", "actor.", "rollout.n=", "trainer.total", "trainer.n_gpus")
        return [word for word in words if not word.startswith(left)]
    return words


FAST = ("a row without a prompt", "sft: no response", "evaluate: a reward that raises")


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in FAST else pytest.mark.full) for c in CASES])
def test_a_check_says_what_the_run_says(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    command, spoil, more = CASES[case]
    parts = Path(shutil.copytree(good, tmp_path / "parts"))
    (parts / "data" / "sft.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 8)
    spoil(parts)
    words = [*words_of(command, parts, tmp_path / "runs"), *(word.replace("PARTS", str(parts)) for word in more)]

    def refused(*further: str) -> list[str]:
        code = main([command, *words, *further])
        err = capsys.readouterr().err
        sentences = [line.removeprefix("error: ") for line in err.splitlines() if line.startswith("error: ")]
        assert code == 2, (code, err)
        return sentences

    checked = refused("trainer.check_only=true")
    assert not (tmp_path / "runs").exists(), "a check writes nothing"
    for sentence in refused():
        assert sentence in checked
