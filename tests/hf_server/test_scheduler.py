"""The batching engine in this process: any mix of requests under any limits gives what one row alone would."""

import copy

import pytest
import torch
from hf_engine import body, running
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_server import VOCAB
from wire import parse_completions

from megarl.hf_server.model import HFModel
from megarl.hf_server.sampling import draw, row_key, uniforms


@pytest.fixture(scope="module")
def model(model_path):
    return HFModel(model_path, torch.float32)


def slow_completion(reference, prompt, index, params):
    """One row by itself: the whole sequence anew for every token."""
    key = torch.tensor([row_key(params["sampling_seed"], index)])
    tokens, log_probs = [], []
    for position in range(params["max_new_tokens"]):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens])).logits[:, -1]
        columns = [torch.tensor([params.get(name, default)]) for name, default in KNOBS]
        token, log_prob = draw(logits, *columns, uniforms(key, torch.tensor([len(prompt) + position])))
        tokens.append(token.item())
        log_probs.append(log_prob.item())
        if tokens[-1] in (1, *params.get("stop_token_ids", ())):
            break
    return tokens, log_probs


KNOBS = [("temperature", 1.0), ("top_p", 1.0), ("top_k", VOCAB)]
TOKENS = st.integers(2, VOCAB - 1)
PARAMS = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 7), "sampling_seed": st.integers(0, 99)},
    optional={
        "temperature": st.sampled_from([0.0, 0.6, 1.4]),
        "top_p": st.sampled_from([0.5, 0.9]),
        "top_k": st.integers(1, 5),
        "stop_token_ids": st.lists(TOKENS, max_size=3),
    },
)
PROMPT = st.lists(st.integers(2, 4), min_size=1, max_size=9)  # of few tokens: many begin alike
REQUEST = st.tuples(PROMPT, st.integers(1, 4), st.sampled_from([None, "a"]), PARAMS)


@settings(max_examples=20)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=6),
    max_running=st.integers(1, 9),
    max_total_tokens=st.integers(16, 60),
)
def test_any_mix_under_any_limit_equals_one_row_alone(model, reference, requests, max_running, max_total_tokens):
    bodies = [body(prompt, n, salt, **params) for prompt, n, salt, params in requests]
    with running(model, max_running=max_running, max_total_tokens=max_total_tokens) as (engine, answer):
        first = answer(bodies)
        slots, positions = engine._cache.size
        assert slots * positions + engine._prefixes.capacity <= max_total_tokens
        again = answer(bodies)
    for (prompt, n, _, params), *replies in zip(requests, first, again, strict=True):
        both = [parse_completions(reply, n) for reply in replies]
        for index, completions in enumerate(zip(*both, strict=True)):
            tokens, log_probs = slow_completion(reference, prompt, index, params)
            for completion in completions:
                assert completion.token_ids == tokens
                assert completion.log_probs == pytest.approx(log_probs, abs=1e-5)


def test_an_error_in_the_engine_reaches_whoever_must_end_the_server(model, monkeypatch):
    def broken(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model, "decode", broken)
    with running(model) as (engine, answer):
        with pytest.raises(RuntimeError, match="out of memory"):
            answer([body([3, 4], max_new_tokens=3)])
        engine._thread.join(5)
        assert not engine.alive


def test_one_server_seed_repeats_itself(model):
    outputs = []
    for _ in range(2):
        with running(model) as (_, answer):
            outputs.append([reply["output_ids"] for reply in answer([body([5, i], max_new_tokens=9) for i in (2, 3)])])
    assert outputs[0] == outputs[1]


def test_bfloat16_is_served_as_transformers_computes_it(model_path, reference):
    model = HFModel(model_path, torch.bfloat16)
    with running(model) as (_, answer):
        prompt = [5, 9, 12, 3]
        (reply,) = answer([body(prompt, max_new_tokens=20, sampling_seed=1, ignore_eos=True)])
    (completion,) = parse_completions(reply, 1)
    with torch.no_grad():
        rounded = copy.deepcopy(reference).to(torch.bfloat16)
        logits = rounded(torch.tensor([prompt + completion.token_ids])).logits[0, 3:-1].float()
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert (torch.tensor(completion.log_probs) - expected).abs().max() < 0.15
    assert (torch.tensor(completion.log_probs) - expected).abs().mean() < 0.03
