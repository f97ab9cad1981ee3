"""The batching engine in this process: any mix of requests under any limits gives what one row alone would."""

from __future__ import annotations

import copy
import threading
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_server import VOCAB

from megarl.hf_server.calls import read_call, write_reply
from megarl.hf_server.model import HFModel
from megarl.hf_server.running_batch import Call
from megarl.hf_server.sampling import draw, row_key, uniforms
from megarl.hf_server.scheduler import HFEngine, _prefill_groups
from megarl.rollout.protocol import SamplingParams, parse_completions


@pytest.fixture(scope="module")
def model(model_path):
    return HFModel(model_path, torch.float32)


@contextmanager
def running(model, **limits):
    """An engine and a function that answers bodies, all submitted at once."""
    deaths, done = [], threading.Semaphore(0)
    limits = {"max_running": 8, "max_total_tokens": None, **limits}
    engine = HFEngine(
        model,
        random_seed=3,
        weight_version="0",
        on_done=lambda calls: [done.release() for _ in calls],
        on_death=lambda error: (deaths.append(error), done.release()),
        **limits,
    )

    def answer(bodies):
        calls = [read_call(body, model, engine.max_total_tokens) for body in bodies]
        for call in calls:
            engine.submit(call)
        for _ in calls:
            assert done.acquire(timeout=30)
            if deaths:
                raise deaths[0]
        return [write_reply(call, body) for call, body in zip(calls, bodies, strict=True)]

    engine.start()
    yield engine, answer
    engine.stop()


def body(prompt, n=1, **params):
    return {"input_ids": prompt, "sampling_params": {"n": n, **params}, "return_logprob": True}


def slow_completion(reference, prompt, index, params):
    """One row by itself: the whole sequence anew for every token."""
    key = torch.tensor([row_key(params["sampling_seed"], index)])
    tokens, log_probs = [], []
    for position in range(params["max_new_tokens"]):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens])).logits[:, -1]
        columns = [torch.tensor([params.get(name, default)]) for name, default in KNOBS]
        token, log_prob = draw(logits, *columns, uniforms(key, torch.tensor([position])))
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
REQUEST = st.tuples(st.lists(TOKENS, min_size=1, max_size=9), st.integers(1, 4), PARAMS)


@settings(max_examples=20)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=6),
    max_running=st.integers(1, 9),
    max_total_tokens=st.integers(16, 60),
)
def test_any_mix_under_any_limit_equals_one_row_alone(model, reference, requests, max_running, max_total_tokens):
    bodies = [body(prompt, n, **params) for prompt, n, params in requests]
    with running(model, max_running=max_running, max_total_tokens=max_total_tokens) as (engine, answer):
        replies = answer(bodies)
        slots, positions = engine._cache.data.shape[1:3]
        assert slots * positions <= max_total_tokens
    for (prompt, n, params), reply in zip(requests, replies, strict=True):
        for index, completion in enumerate(parse_completions(reply, n)):
            tokens, log_probs = slow_completion(reference, prompt, index, params)
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


def test_a_refused_order_does_not_end_the_engine(model):
    def refuse():
        raise ValueError("not now")

    with running(model) as (engine, answer):
        with pytest.raises(ValueError, match="not now"):
            engine.run_now(refuse).result(5)
        assert len(answer([body([3, 4], max_new_tokens=3, ignore_eos=True)])[0]["output_ids"]) == 3


def test_one_server_seed_repeats_itself(model):
    outputs = []
    for _ in range(2):
        with running(model) as (_, answer):
            outputs.append([reply["output_ids"] for reply in answer([body([5, i], max_new_tokens=9) for i in (2, 3)])])
    assert outputs[0] == outputs[1]


def test_completions_of_a_prompt_share_its_prefill_and_lengths_stay_close():
    call = Call()
    params = SamplingParams(max_new_tokens=1)
    for length in [5, 300, 6, 5]:
        call.add(3, "r", list(range(length)), params, ())
    groups = _prefill_groups(call.rows)
    shapes = [[(len(rows[0].prompt), len(rows)) for rows in group] for group in groups]
    assert shapes == [[(5, 3), (5, 3), (6, 3)], [(300, 3)]]


def test_retracted_rows_of_one_prompt_are_prefilled_apart():
    call = Call()
    call.add(2, "r", [5, 6], SamplingParams(max_new_tokens=3), ())
    call.rows[0].token_ids = [7]
    assert [[rows[0].sequence for rows in group] for group in _prefill_groups(call.rows)] == [[[5, 6], [5, 6, 7]]]


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
