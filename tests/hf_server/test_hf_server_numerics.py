"""The HF server's tokens and log-probs against transformers' own, and against itself in other company."""

from __future__ import annotations

import asyncio
import random
import shutil

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_server import CONTEXT, EOS, VOCAB
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from megarl.hf_server.generation.model import HFModel
from megarl.rollout.protocol import Route, SamplingParams, auth_headers, generate_body, parse_completions

PROMPTS = [[random.Random(i).randrange(2, VOCAB) for _ in range(3 + i % 7)] for i in range(12)]
SEEDED = SamplingParams(max_new_tokens=24, sampling_seed=11)


def ask(server, requests):
    """requests: [(delay_s, prompt, n, params)], all under way together; their completions in order."""

    async def one(session, number, delay_s, prompt, n, params):
        await asyncio.sleep(delay_s)
        async with session.post(
            server.url + Route.GENERATE, json=generate_body(prompt, n, params, f"{number}")
        ) as reply:
            assert reply.status == 200, await reply.text()
            return parse_completions(await reply.json(), n)

    async def run():
        async with aiohttp.ClientSession(headers=auth_headers(server.token)) as session:
            return await asyncio.gather(*(one(session, number, *request) for number, request in enumerate(requests)))

    return asyncio.run(run())


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


@pytest.mark.parametrize("params", [{"temperature": 0.7}, {"top_p": 0.6}, {"top_k": 3, "temperature": 1.3}])
def test_log_probs_are_of_the_whole_temperature_scaled_softmax(server, reference, params):
    params = SamplingParams(max_new_tokens=16, sampling_seed=2, **params)
    answers = ask(server, [(0, prompt, 2, params) for prompt in PROMPTS])
    for prompt, completions in zip(PROMPTS, answers, strict=True):
        for completion in completions:
            expected = reference_log_probs(reference, prompt, completion.token_ids, params.temperature)
            assert completion.log_probs == pytest.approx(expected, abs=1e-5)


def test_prompt_log_probs_equal_transformers(server, reference):
    prompt = PROMPTS[5]
    body = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": 0}
    body["sampling_params"] = {"max_new_tokens": 1, "temperature": 0.5}
    triples = server.ask("/generate", body).json()["meta_info"]["input_token_logprobs"]
    expected = reference_log_probs(reference, prompt[:1], prompt[1:], 1.0)
    assert [triple[0] for triple in triples[1:]] == pytest.approx(expected, abs=1e-5)


def test_a_seeded_completion_does_not_depend_on_its_company(server):
    alone = [ask(server, [(0, prompt, 3, SEEDED)])[0] for prompt in PROMPTS]
    crowd = [(0.002 * i, prompt, 3, SEEDED) for i, prompt in enumerate(PROMPTS)]
    crowd += [(0.003 * i, [5] * 40, 2, SamplingParams(max_new_tokens=30, top_p=0.5)) for i in range(10)]
    together = ask(server, crowd)[: len(PROMPTS)]
    for one, other in zip(alone, together, strict=True):
        assert [c.token_ids for c in one] == [c.token_ids for c in other]
        for a, b in zip(one, other, strict=True):
            assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)


def test_completions_of_one_prompt_differ_and_the_first_of_more_are_the_same(server):
    few, many = ask(server, [(0, PROMPTS[0], 2, SEEDED), (0, PROMPTS[0], 5, SEEDED)])
    assert [c.token_ids for c in few] == [c.token_ids for c in many[:2]]
    assert len({tuple(c.token_ids) for c in many}) == 5


def test_without_a_seed_two_requests_differ(server):
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    one, other = ask(server, [(0, PROMPTS[0], 1, params), (0, PROMPTS[0], 1, params)])
    assert one[0].token_ids != other[0].token_ids


def test_a_sampled_distribution_is_the_models(server, reference):
    prompt, n = PROMPTS[3], 2000
    params = SamplingParams(max_new_tokens=1, temperature=0.8, top_p=0.7, sampling_seed=5)
    (completions,) = ask(server, [(0, prompt, n, params)])
    found = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=VOCAB) / n
    with torch.no_grad():
        probs = torch.softmax(reference(torch.tensor([prompt])).logits[0, -1] / 0.8, -1)
    probs, order = probs.sort(descending=True)
    probs[probs.cumsum(0) - probs > 0.7] = 0
    expected = torch.zeros(VOCAB).scatter(0, order, probs / probs.sum())
    assert (found - expected).abs().max() < 0.05
    assert ((found > 0) <= (expected > 0)).all()


def test_a_long_row_beside_short_ones_stays_exact(server, reference):
    prompt = [random.Random(1).randrange(2, VOCAB) for _ in range(700)]
    params = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
    short = SamplingParams(max_new_tokens=5)
    (completion,), *_ = ask(server, [(0, prompt, 1, params), *((0.01 * i, [4], 9, short) for i in range(12))])
    expected = reference_log_probs(reference, prompt, completion.token_ids, 1.0)
    assert completion.log_probs == pytest.approx(expected, abs=1e-5)


SHAPE = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}


def test_a_tied_model_holds_its_shared_weight_once(tied_path):
    names = set(HFModel(tied_path, torch.float32).weights)
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_a_tied_folder_that_stores_both_names_answers_to_both(tied_path, tmp_path):
    shutil.copytree(tied_path, tmp_path / "both")
    tensors = load_file(f"{tied_path}/model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "both/model.safetensors", metadata={"format": "pt"})
    model = HFModel(str(tmp_path / "both"), torch.float32)
    assert model.weights["lm_head.weight"] is model.weights["model.embed_tokens.weight"]


@pytest.mark.parametrize(("config", "kind"), [(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM)])
def test_other_families_are_served(config, kind, tmp_path):
    kind(config(**SHAPE, eos_token_id=[3, 4])).save_pretrained(tmp_path)
    model = HFModel(str(tmp_path), torch.bfloat16)
    assert model.eos_ids == (3, 4)
    assert model.vocab_size == 40
    assert all(tensor.dtype == torch.bfloat16 for tensor in model.weights.values())


def test_a_model_with_a_sliding_window_is_refused(tmp_path):
    config = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="sliding_attention"):
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


def test_a_folder_without_safetensors_is_refused(tmp_path):
    with pytest.raises((ValueError, OSError), match=str(tmp_path)):
        HFModel(str(tmp_path), torch.float32)
