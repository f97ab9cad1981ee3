"""The tiny model and the two tasks of the examples: answers right and careless, files that share no row."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.arch.hf_config import read_config
from megarl.data.chat import encode, load_tokenizer
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tasks import Sums, answer, has_carry, join, without_carry, write_reversals, write_task
from megarl.data.examples.tiny import CHARACTERS, FAMILIES, tiny_tokenizer, write_tiny_model
from megarl.data.template import ChatTemplate

SMALL = TinySizes(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", SMALL)


def test_the_folder_is_an_ordinary_qwen3(folder):
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert config["tie_word_embeddings"] is True
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.head_dim == 8
    assert model.generation_config.eos_token_id == load_tokenizer(str(folder)).eos_token_id
    assert sum(p.numel() for p in model.parameters()) < 40_000
    assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, config["vocab_size"])


def test_the_tokenizer_survives_the_folder_and_loses_no_character(folder):
    tokenizer = load_tokenizer(str(folder))
    assert len(tokenizer) == len(set(tiny_tokenizer().get_vocab()))
    assert set(CHARACTERS) == {chr(code) for code in range(32, 127)} | {"\n"}, "every printable character"
    assert encode(tokenizer, "é") == [tokenizer.unk_token_id]
    ids = encode(tokenizer, CHARACTERS)
    assert len(ids) == len(CHARACTERS) == len(set(ids))
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer.decode([*encode(tokenizer, "46"), tokenizer.eos_token_id], skip_special_tokens=True) == "46"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.chat_template


def test_words_are_tokens_and_the_template_writes_conversations_with_tools(tmp_path):
    words = ("<tool>", "<tool_call>", "</tool_call>", "add")
    folder = write_tiny_model(tmp_path / "m", SMALL, words=words)
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == len(tiny_tokenizer()) + len(words)
    tokenizer = load_tokenizer(str(folder))
    assert len(encode(tokenizer, "add+<tool>")) == 3
    template = ChatTemplate(tokenizer)
    assert template.check(with_tools=True) is None
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "sub")]
    messages = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    asked = "<system>add sub<eos><user>1?<eos><assistant>"
    called = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert tokenizer.decode(template.whole(messages, tools)) == f"{asked}{called}<eos><tool>2<eos><assistant>"
    behind = template.bridge(messages[1], messages[2:], tools)
    assert tokenizer.decode(behind.after(tokenizer.eos_token_id, ended=True)) == "<tool>2<eos><assistant>"


def test_the_seed_decides_the_weights_and_leaves_the_callers_random_state(tmp_path):
    state = torch.random.get_rng_state()
    models = [
        AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / str(i), SMALL, seed=seed)).state_dict()
        for i, seed in enumerate((0, 0, 1))
    ]
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(models[0][name], models[1][name])
    assert not torch.equal(models[0][name], models[2][name])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_qwen2_bfloat16_untied(tmp_path):
    folder = write_tiny_model(tmp_path / "m", SMALL, family="qwen2", dtype="bfloat16", tied=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    names = dict(model.named_parameters())
    assert "lm_head.weight" in names
    assert "model.layers.0.self_attn.q_proj.bias" in names
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_written_under_hub_names(tmp_path, family):
    folder = write_tiny_model(tmp_path / "m", SMALL, family=family)
    assert json.loads((folder / "config.json").read_text())["model_type"] == family
    names = list(load_file(folder / "model.safetensors"))
    stacked = [name for name in names if "gate_up_proj" in name]
    assert bool(stacked) == (family == "gpt_oss"), "of other families no experts are in one tensor"
    model = AutoModelForCausalLM.from_pretrained(folder, config=read_config(str(folder)))
    assert model.config.num_hidden_layers == 2


def test_settings_of_a_family_go_over_its_own(tmp_path):
    folder = write_tiny_model(tmp_path / "m", SMALL, family="qwen3_moe", num_experts=8, mlp_only_layers=[0])
    shapes = {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    assert shapes["model.layers.1.mlp.gate.weight"] == (8, 32)
    assert shapes["model.layers.1.mlp.experts.7.down_proj.weight"] == (32, 96)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (32, 48)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt2", {}, f"family='gpt2': expected one of {', '.join(FAMILIES)}"),
        ("qwen3", {"kv_heads": 3}, "heads=4, kv_heads=3: expected heads to be a multiple of kv_heads"),
        ("qwen2", {"head_dim": 16}, "head_dim=16: expected hidden / heads for qwen2"),
    ],
)
def test_mistakes_are_named(tmp_path, family, changes, words):
    with pytest.raises(ValueError, match=words):
        write_tiny_model(tmp_path / "a", replace(SMALL, **changes), family=family)
    assert not (tmp_path / "a").exists()


def test_a_folder_that_is_not_empty_is_kept(folder):
    with pytest.raises(ValueError, match="the folder is not empty; expected a new one"):
        write_tiny_model(folder)


FILES = ("sft", "train", "test")


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(row: dict[str, str]) -> tuple[int, int]:
    a, b = row["prompt"].removesuffix("=").split("+")
    return int(a), int(b)


def test_the_three_files_of_sums_are_disjoint_complete_and_right(tmp_path: Path) -> None:
    write_task(tmp_path)
    sft, train, test = (rows(tmp_path / f"{name}.jsonl") for name in FILES)
    assert (len(sft), len(train), len(test)) == (2700, 5144, 256)
    answers = {numbers(row): row["response"] for row in sft}
    answers |= {numbers(row): row["ground_truth"] for row in train + test}
    assert len(answers) == 8100
    assert all(int(answer) == a + b for (a, b), answer in answers.items())
    assert {row["data_source"] for row in train + test} == {"arithmetic"}


def test_the_manifest_describes_the_files_which_are_the_same_for_a_seed(tmp_path: Path) -> None:
    sums = Sums(num_sft=5, num_test=3, low=1, high=4)
    same = [write_task(tmp_path / str(i), replace(sums, seed=seed)) for i, seed in enumerate((0, 0, 1))]
    assert same[0] == same[1] == json.loads((tmp_path / "0" / "manifest.json").read_text())
    assert same[0]["files"]["test.jsonl"] != same[2]["files"]["test.jsonl"]
    assert [same[0]["files"][f"{name}.jsonl"]["rows"] for name in FILES] == [5, 8, 3]
    for name, entry in same[0]["files"].items():
        assert hashlib.sha256((tmp_path / "0" / name).read_bytes()).hexdigest() == entry["sha256"]


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_sft=3 and num_test=1: expected a sum below the 4 pairs there are"):
        write_task(tmp_path, Sums(num_sft=3, num_test=1, low=1, high=2))
    with pytest.raises(ValueError, match="carrying=0: expected a share above 0"):
        write_task(tmp_path, Sums(carrying=0))


def test_a_careless_teacher_forgets_the_carry_in_its_share_of_demonstrations(tmp_path: Path) -> None:
    assert [without_carry(a, b) for a, b in ((17, 25), (12, 34), (99, 99), (55, 45))] == [32, 46, 188, 90]
    write_task(tmp_path, Sums(num_sft=1000, careless=0.6, demonstrations=2))
    shown = rows(tmp_path / "sft.jsonl")
    assert len(shown) == 2 * len({row["prompt"] for row in shown}) == 2000
    lost = [sum(numbers(row)) - int(row["response"]) for row in shown]
    carries = [has_carry(*numbers(row)) for row in shown]
    assert {loss for loss, carry in zip(lost, carries, strict=True) if not carry} == {0}
    forgotten = [loss for loss, carry in zip(lost, carries, strict=True) if carry]
    assert set(forgotten) == {0, 10}
    assert sum(forgotten) / 10 / len(forgotten) == pytest.approx(0.6, abs=0.05)  # 900 coins: 3 standard deviations
    truths = rows(tmp_path / "train.jsonl")[:100]
    assert all(int(row["ground_truth"]) == sum(numbers(row)) for row in truths), "the reward knows better"


def test_the_share_of_carries_can_be_chosen(tmp_path: Path) -> None:
    write_task(tmp_path, Sums(num_sft=0, num_test=0, carrying=0.75))
    carries = [has_carry(*numbers(row)) for row in rows(tmp_path / "train.jsonl")]
    assert sum(carries) == 3645, "all there are: 81 pairs of tens and 45 of units"
    assert len(carries) == 4860


def test_reversals_by_hand() -> None:
    assert (answer("1234"), answer("1234", careless=True)) == ("4321", "4231")
    assert answer("1225", careless=True) == answer("1225"), "where the middle digits are equal nothing shows"


def test_no_reversed_number_is_in_two_files_and_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    sizes = {"num_sft": 30, "num_train": 20, "num_test": 10}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_reversals(tmp_path / name, seed=seed, careless=0.5, demonstrations=2, **sizes)
    files = {name: rows(tmp_path / "a" / f"{name}.jsonl") for name in FILES}
    assert [len(found) for found in files.values()] == [60, 20, 10]
    prompts = [{row["prompt"] for row in found} for found in files.values()]
    assert len(set.union(*prompts)) == sum(len(found) for found in prompts) == 60
    careless = [row["response"] == answer(row["prompt"][:-1]) for row in files["sft"]]
    assert 0.2 < sum(careless) / 60 < 0.8
    assert all(row["ground_truth"] == answer(row["prompt"][:-1]) for row in files["test"])
    assert {row["data_source"] for row in files["train"]} == {"reversal"}
    same, other = ((tmp_path / name / "sft.jsonl").read_bytes() for name in ("b", "c"))
    assert (tmp_path / "a" / "sft.jsonl").read_bytes() == same != other


@pytest.mark.parametrize("careless", [0.0, 1.0])
def test_shares_of_careless_reversals_at_the_ends(tmp_path: Path, careless: float) -> None:
    write_reversals(tmp_path, careless=careless, num_sft=9, num_train=1, num_test=1)
    for row in rows(tmp_path / "sft.jsonl"):
        assert row["response"] == answer(row["prompt"][:-1], careless=careless == 1)


def test_two_tasks_in_turn(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 1)):
        (tmp_path / name).mkdir()
        for file in FILES:
            lines = [f'{{"prompt": "{name}{i}"}}\n' for i in range(count)]
            (tmp_path / name / f"{file}.jsonl").write_text("".join(lines))
    join(tmp_path / "both", [tmp_path / "a", tmp_path / "b"])
    assert [row["prompt"] for row in rows(tmp_path / "both" / "train.jsonl")] == ["a0", "b0", "a1", "a2"]
