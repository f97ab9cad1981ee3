"""What our own server refuses although stock SGLang takes it, silently mistakes it, or dies of it."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from wire import parse_completions

from megarl.rollout.client import ServerError
from megarl.rollout.protocol import Route, SamplingParams, generate_body

PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_ids": [5, 32]}, "32"),
        ({"input_ids": [5, -1]}, "-1"),
        ({"input_ids": [[5], []]}, "input_ids"),
        ({"input_ids": [5] * 4095}, "exceed 4096"),
        ({"sampling_params": {"temprature": 1.0}}, "temprature"),
        ({"sampling_params": {"temperature": -0.5}}, "temperature=-0.5"),
        ({"sampling_params": {"top_p": 0}}, "top_p=0"),
        ({"sampling_params": {"top_k": 0}}, "top_k=0"),
        ({"sampling_params": {"n": 0}}, "n=0"),
        ({"sampling_params": {"n": 4097}}, "n=4097 for 1 prompts: expected at most 4096 completions a request"),
        ({"sampling_params": {"n": 10**18}}, "expected at most 4096 completions"),
        ({"sampling_params": {"n": 10**30}}, "n=1e+30: expected a whole number"),
        ({"input_ids": [[5]] * 2049, "sampling_params": {"n": 2}}, "n=2 for 2049 prompts"),
        ({"sampling_params": {"max_new_tokens": 2.5}}, "max_new_tokens=2.5"),
        ({"sampling_params": {"stop_token_ids": 3}}, "stop_token_ids=3"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"top_logprobs_num": -1, "logprob_start_len": 0}, "top_logprobs_num=-1"),
        ({"top_logprobs_num": 33, "logprob_start_len": 0}, "top_logprobs_num=33: expected 0 (none) to 32"),
        ({"top_logprobs_num": 2}, "this server tells the most likely tokens of prompts only"),
        ({"cache_salt": 5}, "cache_salt=5"),
        ({"cache_salt": ["a", "b"]}, "cache_salt"),
        ({"cache_salt": [None]}, "cache_salt"),
    ],
)
def test_a_wrong_request_is_refused_with_key_and_value(server, change, words):
    reply = server.ask(Route.GENERATE, {**generate_body(PROMPT, 1, GREEDY, "r"), **change})
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


def test_an_unknown_memory_tag_and_a_group_that_was_never_joined_are_named(server):
    with pytest.raises(ServerError, match="nobody"):
        server.engine.destroy_group("nobody")
    with pytest.raises(ServerError, match="hats"):
        server.engine.release_memory(["hats"])


def test_requests_wait_while_the_kv_cache_is_released(server):
    body = generate_body(PROMPT, 1, GREEDY, "r")
    before = parse_completions(server.ask(Route.GENERATE, body).json(), 1)[0]
    server.engine.release_memory(["kv_cache"])
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(server.ask, Route.GENERATE, body)
        time.sleep(0.1)
        assert not future.done()
        server.engine.resume_memory(["kv_cache"])
        after = parse_completions(future.result(timeout=20).json(), 1)[0]
    assert after.token_ids == before.token_ids
    assert after.log_probs == pytest.approx(before.log_probs, abs=1e-5)
