"""What our own server refuses although stock SGLang takes it, silently mistakes it, or dies of it."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from spoilt_requests import collected, requests, statuses
from tiny_server import TOKEN
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
        ({"sampling_params": {"n": 10**30}}, "expected at most 4096 completions"),
        ({"input_ids": [[5]] * 2049, "sampling_params": {"n": 2}}, "n=2 for 2049 prompts"),
        ({"sampling_params": {"max_new_tokens": 2.5}}, "max_new_tokens=2.5"),
        ({"sampling_params": {"stop_token_ids": 3}}, "stop_token_ids=3"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"top_logprobs_num": -1, "logprob_start_len": 0}, "top_logprobs_num=-1"),
        ({"top_logprobs_num": 33, "logprob_start_len": 0}, "top_logprobs_num=33: expected 0 (none) to 32"),
        ({"top_logprobs_num": 2}, "this server reports the most likely tokens of prompts only"),
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


GROUP = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
TENSORS = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[32]], "group_name": "nobody"}
BODIES = [
    generate_body(PROMPT, 2, GREEDY, "r") | {"top_logprobs_num": 1, "logprob_start_len": 1},
    {"mode": "retract", "tags": ["weights"], "rid": "r", "abort_all": False, "action": "checksum"},
    GROUP | TENSORS,
    {"serialized_named_tensors": ["gASVBQAAAAAAAABdlGEu"], "load_format": "flattened_bucket", "flush_cache": True},
    {"model_path": "/no_such_folder", "weight_version": "3", "load_format": None},
]
STRANGER = b"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n"
WRONG_GROUPS = [("master_port", 10**9), ("master_port", -1), ("world_size", 2**62), ("group_name", [])]


def test_no_request_is_an_error_of_the_server_and_none_fills_its_log(server):
    port, (log,) = int(server.url.rpartition(":")[2]), server.logs.glob("*.log")
    begin = log.stat().st_size
    stopping = (Route.INIT_GROUP, Route.PAUSE, Route.RELEASE_MEMORY)  # the next request would wait
    sent = [STRANGER, *collected(requests([route for route in Route if route not in stopping], TOKEN, BODIES), 400)]
    heard = statuses(port, sent)
    assert heard[0] == 401
    assert sum(status == 400 for status in heard) > 100
    assert not [pair for pair in zip(heard, sent, strict=True) if pair[0] and pair[0] >= 500]
    for name, value in WRONG_GROUPS:
        assert server.ask(Route.INIT_GROUP, GROUP | {name: value}).status_code == 400, (name, value)
    for route, name in ((Route.PAUSE, "mode"), (Route.RELEASE_MEMORY, "tags")):
        for value in (5, [[]], {"a": 1}, "hats", True):
            assert server.ask(route, {name: value}).status_code == 400, (name, value)
    added = log.read_bytes()[begin:]
    assert len(added) < 100 * len(sent) and b"Traceback" not in added, added[-3000:]
