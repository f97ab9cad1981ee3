import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.data.chat import encode, load_tokenizer
from megarl.data.examples.tiny import CHARACTERS, FAMILIES, tiny_tokenizer, write_tiny_model
from megarl.data.hf_config import read_config
from megarl.data.template import ChatTemplate

SMALL = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", **SMALL)


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
    ids = encode(tokenizer, CHARACTERS)
    assert len(ids) == len(CHARACTERS) == len(set(ids))
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer.decode([*encode(tokenizer, "46"), tokenizer.eos_token_id], skip_special_tokens=True) == "46"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.chat_template


def test_every_printable_character_has_a_token():
    assert set(CHARACTERS) == {chr(code) for code in range(32, 127)} | {"\n"}
    assert encode(tiny_tokenizer(), "é") == [tiny_tokenizer().unk_token_id]


def test_words_are_tokens_and_the_template_writes_conversations_with_tools(tmp_path):
    words = ("<tool>", "<tool_call>", "</tool_call>", "add")
    folder = write_tiny_model(tmp_path / "m", words=words, **SMALL)
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
        AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / str(i), seed=seed, **SMALL)).state_dict()
        for i, seed in enumerate((0, 0, 1))
    ]
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(models[0][name], models[1][name])
    assert not torch.equal(models[0][name], models[2][name])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_qwen2_bfloat16_untied(tmp_path):
    folder = write_tiny_model(tmp_path / "m", family="qwen2", dtype="bfloat16", tied=False, **SMALL)
    model = AutoModelForCausalLM.from_pretrained(folder)
    names = dict(model.named_parameters())
    assert "lm_head.weight" in names
    assert "model.layers.0.self_attn.q_proj.bias" in names
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_written_under_hub_names(tmp_path, family):
    folder = write_tiny_model(tmp_path / "m", family=family, **SMALL)
    assert json.loads((folder / "config.json").read_text())["model_type"] == family
    names = list(load_file(folder / "model.safetensors"))
    stacked = [name for name in names if "gate_up_proj" in name]
    assert bool(stacked) == (family == "gpt_oss"), "of other families no experts are in one tensor"
    model = AutoModelForCausalLM.from_pretrained(folder, config=read_config(str(folder)))
    assert model.config.num_hidden_layers == 2


def test_settings_of_a_family_go_over_its_own(tmp_path):
    folder = write_tiny_model(tmp_path / "m", family="qwen3_moe", num_experts=8, mlp_only_layers=[0], **SMALL)
    shapes = {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    assert shapes["model.layers.1.mlp.gate.weight"] == (8, 32)
    assert shapes["model.layers.1.mlp.experts.7.down_proj.weight"] == (32, 96)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (32, 48)


def test_mistakes_are_named(tmp_path, folder):
    with pytest.raises(ValueError, match="the folder is not empty; expected a new one"):
        write_tiny_model(folder)
    with pytest.raises(
        ValueError, match="family='gpt2': expected one of qwen3, qwen2, llama, mistral, qwen3_moe, mixtral"
    ):
        write_tiny_model(tmp_path / "a", family="gpt2")
    with pytest.raises(ValueError, match="heads=4, kv_heads=3: expected heads to be a multiple of kv_heads"):
        write_tiny_model(tmp_path / "a", **{**SMALL, "kv_heads": 3})
    with pytest.raises(ValueError, match="head_dim=16: expected hidden / heads for qwen2"):
        write_tiny_model(tmp_path / "a", family="qwen2", **{**SMALL, "head_dim": 16})
    assert not (tmp_path / "a").exists()
