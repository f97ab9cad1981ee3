"""The HF server's tokens and log-probs against transformers' own, and against itself in other company."""

import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_server import CONTEXT, EOS, VOCAB
from transformers import Qwen2Config, Qwen2ForCausalLM
from wire import parse_completions

from megarl.hf_server.model import HFModel
from megarl.rollout.protocol import Route, SamplingParams, generate_body

PROMPTS = [[random.Random(i).randrange(2, VOCAB) for _ in range(3 + i % 7)] for i in range(12)]


def ask(server, requests):
    """requests: [(delay_s, prompt, n, params)], all under way together; their completions in order."""

    def one(number, delay_s, prompt, n, params):
        time.sleep(delay_s)
        return parse_completions(server.ask(Route.GENERATE, generate_body(prompt, n, params, f"{number}")).json(), n)

    with ThreadPoolExecutor(len(requests)) as threads:
        return [job.result() for job in [threads.submit(one, i, *each) for i, each in enumerate(requests)]]


def reference_log_probs(reference, prompt, token_ids, temperature):
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


def test_greedy_equals_transformers_generate(server, reference):
    params = SamplingParams(temperature=0, max_new_tokens=24)
    answers = ask(server, [(0, prompt, 1, params) for prompt in PROMPTS])
    for prompt, (completion,) in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        assert completion.token_ids == expected[0, len(prompt) :].tolist()
        log_probs = reference_log_probs(reference, prompt, completion.token_ids, 1.0)
        assert completion.log_probs == pytest.approx(log_probs, abs=1e-5)
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == EOS else "length")


def test_without_a_seed_two_requests_differ(server):
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    one, other = ask(server, [(0, PROMPTS[0], 1, params), (0, PROMPTS[0], 1, params)])
    assert one[0].token_ids != other[0].token_ids


def test_a_long_row_beside_short_ones_stays_exact(server, reference):
    prompt = [random.Random(1).randrange(2, VOCAB) for _ in range(700)]
    params = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
    short = SamplingParams(max_new_tokens=5)
    (completion,), *_ = ask(server, [(0, prompt, 1, params), *((0.01 * i, [4], 9, short) for i in range(12))])
    expected = reference_log_probs(reference, prompt, completion.token_ids, 1.0)
    assert completion.log_probs == pytest.approx(expected, abs=1e-5)


SHAPE = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}


def test_a_tied_model_holds_its_shared_weight_once_and_answers_to_both_names_where_its_folder_does(tied_path, tmp_path):
    names = set(HFModel(tied_path, torch.float32).weights)
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    shutil.copytree(tied_path, tmp_path / "both")
    tensors = load_file(f"{tied_path}/model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "both/model.safetensors", metadata={"format": "pt"})
    model = HFModel(str(tmp_path / "both"), torch.float32)
    assert model.weights["lm_head.weight"] is model.weights["model.embed_tokens.weight"]


def test_several_ends_are_read_and_a_window_over_some_layers_is_refused(tmp_path):
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    for name, more in (("ends", {"eos_token_id": [3, 4]}), ("windows", windows)):
        Qwen2ForCausalLM(Qwen2Config(**SHAPE, **more)).save_pretrained(tmp_path / name)
    model = HFModel(str(tmp_path / "ends"), torch.bfloat16)
    assert (model.eos_ids, model.vocab_size) == ((3, 4), 40)
    assert all(tensor.dtype == torch.bfloat16 for tensor in model.weights.values())
    with pytest.raises(ValueError, match="sliding_attention"):
        HFModel(str(tmp_path / "windows"), torch.float32)
    with pytest.raises((ValueError, OSError), match=str(tmp_path)):
        HFModel(str(tmp_path), torch.float32)


@pytest.mark.parametrize("number", [torch.nan, -torch.inf])
def test_weights_that_are_not_finite_are_refused_at_the_start_and_from_another_folder(tied_path, tmp_path, number):
    folder, name = shutil.copytree(tied_path, tmp_path / "bad"), "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name][-1, -1] = number
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sentence = rf"^{folder}/model.safetensors: the tensor {name} holds {number}; expected finite numbers$"
    with pytest.raises(ValueError, match=sentence):
        HFModel(str(folder), torch.float32)
    with pytest.raises(ValueError, match=sentence):
        HFModel(tied_path, torch.float32).read_folder(str(folder))
