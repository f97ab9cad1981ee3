"""What every rollout server must answer, whoever wrote it: each route, and each way to be refused.

Where stock SGLang dies of a request instead of refusing it, our side never sends that request:
`test_hf_server_refusals` has what our own server says to it, `test_pool` and `test_protocol` that it is not sent.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor, wait

import aiohttp
import pytest
from safetensors import safe_open
from spawn import DEVICE
from tiny_server import PARAMS, TRUSTED

from megarl.rollout.client import Load, ServerError
from megarl.rollout.protocol import (
    Route,
    SamplingParams,
    auth_headers,
    error_message,
    generate_body,
    parse_completions,
)
from megarl.sample import VersionSpan
from megarl.weights.verify.digests import Kind, digest

PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=3000, ignore_eos=True, sampling_seed=3)
REFUSED = (400, 422)  # the second by the router
LIMIT_S = 240  # of what must happen, however busy the machine is
# Between log-probs of the same tokens, read in one pass or written one by one: GPUs sum in another order for each size.
CLOSE = 1e-4 if DEVICE == "cuda" else 1e-5
LONG_GREEDY = SamplingParams(temperature=0, max_new_tokens=1000, ignore_eos=True)


def generate(server, n=1, params=GREEDY, prompt=PROMPT, rid=None):
    reply = server.ask(Route.GENERATE, generate_body(prompt, n, params, rid or uuid.uuid4().hex))
    assert reply.status_code == 200, reply.text
    return parse_completions(reply.json(), n)


def wait_until_running(server, count=1):
    """Servers tell nobody when they begin with a request: they are asked, every 10 ms."""
    deadline = time.monotonic() + LIMIT_S
    while server.num_running() < count:
        assert time.monotonic() < deadline, "the request never began to run"
        time.sleep(0.01)
    while server.variant.engine == "sglang" and server.num_tokens() < 2 * len(PROMPT) + 8:  # it is not only read
        assert time.monotonic() < deadline, "the request writes nothing"
        time.sleep(0.01)


@pytest.fixture
def server(any_server):
    """Every test of this file runs against every variant."""
    return any_server


@pytest.fixture
def background():
    with ThreadPoolExecutor(4) as threads:
        yield threads


def test_health_answers_200(server):
    assert server.ask(Route.HEALTH, method="GET").status_code == 200


def test_every_route_but_health_wants_the_token(server):
    for route in set(Route) - {Route.HEALTH}:
        for token in ("", "wrong", server.token + "x"):
            assert server.ask(route, {}, token=token).status_code == 401, route


def test_an_unknown_route_is_404(server):
    assert server.ask("/no_such_route", {}).status_code == 404


def test_model_info_tells_the_version_and_the_folder(server):
    info = server.engine.model_info()
    assert info["model_path"] == server.model_path
    assert info["weight_version"] == "0"
    assert info["is_generation"] is True


def test_server_info_has_a_version_and_the_states(server):
    info = server.engine.server_info()
    assert info["version"]
    assert info["internal_states"]
    assert server.num_running() == 0


def test_the_load_is_that_of_the_running_requests(server, background):
    future = background.submit(server.ask, Route.GENERATE, generate_body(PROMPT, 4, LONG, "r"))
    wait_until_running(server, count=4)
    deadline = time.monotonic() + LIMIT_S
    loads: list[Load] = []
    while sum(load.running for load in loads) < 4:  # SGLang says what its last batch was
        assert time.monotonic() < deadline, loads
        loads = [load for engine in server.engine.engines for load in engine.loads()]
        assert not future.done(), loads
    assert all(load.waiting >= 0 for load in loads)
    assert 0 < sum(load.kv_share for load in loads) <= len(loads)
    server.engine.abort(everything=True)
    future.result(timeout=LIMIT_S)


def test_one_prompt_gives_one_object_with_tokens_log_probs_and_versions(server):
    body = generate_body(PROMPT, 1, GREEDY, "mine")
    item = server.ask(Route.GENERATE, body).json()
    meta = item["meta_info"]
    assert len(item["output_ids"]) == 6
    assert [triple[1] for triple in meta["output_token_logprobs"]] == item["output_ids"]
    assert all(triple[0] <= 0 for triple in meta["output_token_logprobs"])
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (4, 6)
    assert meta["weight_version"] == "0"
    if server.engine.abilities.version_spans:
        assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
    assert meta["input_token_logprobs"] == []


def test_several_prompts_and_n_give_a_flat_list_prompt_after_prompt(server):
    prompts = [[5, 6, 7], [9, 10, 11, 12], [13]]
    body = {"input_ids": prompts, "sampling_params": GREEDY.to_json(2), "return_logprob": True}
    items = server.ask(Route.GENERATE, body).json()
    alone = [generate(server, prompt=prompt)[0].token_ids for prompt in prompts]
    assert [item["output_ids"] for item in items] == [tokens for tokens in alone for _ in range(2)]


def test_a_list_with_one_prompt_gives_a_list(server):
    reply = server.ask(Route.GENERATE, {"input_ids": [PROMPT], "sampling_params": GREEDY.to_json()}).json()
    assert isinstance(reply, list)
    assert "output_token_logprobs" not in reply[0]["meta_info"]


def test_prompt_log_probs_come_when_asked_for(server):
    body = {**generate_body(PROMPT, 1, GREEDY, "r"), "logprob_start_len": 0}
    triples = server.ask(Route.GENERATE, body).json()["meta_info"]["input_token_logprobs"]
    assert [triple[1] for triple in triples] == PROMPT
    assert triples[0][0] is None
    assert all(triple[0] < 0 for triple in triples[1:])


def test_a_stop_token_ends_a_completion_and_is_part_of_it(server):
    free = generate(server)[0].token_ids
    params = SamplingParams(temperature=0, max_new_tokens=6, stop_token_ids=(free[2],))
    stopped = generate(server, params=params)[0]
    assert stopped.token_ids == free[: free.index(free[2]) + 1]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": [5] * 4095}, "exceed"),
        ({"sampling_params": {"temperature": -0.5}}, "temperature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"top_k": 0}}, "top_k"),
    ],
)
def test_a_wrong_request_is_refused_with_a_sentence(server, change, words):
    reply = server.ask(Route.GENERATE, {**generate_body(PROMPT, 1, GREEDY, "r"), **change})
    assert reply.status_code in REFUSED
    assert words in error_message(reply.text, "")


def test_a_body_that_is_no_json_object_is_refused(server):
    assert server.ask(Route.GENERATE, [1, 2]).status_code in REFUSED


def test_abort_ends_a_request_with_what_it_wrote(server, background):
    future = background.submit(generate, server, 1, LONG, rid="victim")
    wait_until_running(server)
    server.engine.abort("somebody else")
    server.engine.abort("victim")
    completion = future.result(timeout=LIMIT_S)[0]
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) == len(completion.log_probs) < 3000


def test_abort_all_ends_running_and_waiting_requests(server, background):
    bodies = [generate_body(PROMPT, 40, LONG, f"r{i}") for i in range(2)]
    futures = [background.submit(server.ask, Route.GENERATE, body) for body in bodies]
    wait_until_running(server, count=20)
    deadline = time.monotonic() + LIMIT_S
    while wait(futures, timeout=0.2).not_done and time.monotonic() < deadline:
        server.engine.abort(everything=True)  # once more: a request may still have been on its way
    for reply in (future.result(timeout=0) for future in futures):
        if reply.status_code != 499:  # which 0.5.17 says of a request that it had not given to a scheduler yet
            assert reply.status_code == 200, reply.text
            assert [completion.finish_reason for completion in parse_completions(reply.json(), 40)] == ["abort"] * 40


def test_a_client_that_hangs_up_ends_its_request(server, background):
    """An equal request that began before it would be done first, if the abandoned one went on."""
    before = background.submit(generate, server, 1, LONG)
    wait_until_running(server)

    async def hang_up():
        body, headers = generate_body(PROMPT, 1, LONG, "abandoned"), auth_headers(server.token)
        async with aiohttp.ClientSession() as session:
            url = next(server.turns) + Route.GENERATE
            asked = asyncio.create_task(session.post(url, json=body, headers=headers, ssl=TRUSTED))
            await asyncio.to_thread(wait_until_running, server, 2)
            asked.cancel()

    asyncio.run(hang_up())
    while server.num_running() > 1:
        time.sleep(0.01)
    assert not before.done(), "the abandoned request went on"
    server.engine.abort(everything=True)
    before.result(timeout=LIMIT_S)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_request_that_comes_during_a_pause_waits_for_its_end(server, background, mode):
    begun = time.monotonic()
    generate(server)
    usual_s = time.monotonic() - begun
    server.engine.pause(mode)
    future = background.submit(generate, server)
    assert not wait([future], timeout=max(0.15, 5 * usual_s)).done, "it was answered, as it is without a pause"
    server.engine.resume()
    assert len(future.result(timeout=LIMIT_S)[0].token_ids) == 6


def test_pause_abort_ends_what_runs(server, background):
    future = background.submit(generate, server, 1, LONG)
    wait_until_running(server)
    server.engine.pause("abort")
    assert future.result(timeout=LIMIT_S)[0].finish_reason == "abort"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_an_update_in_mid_generation_shows_in_the_version_spans(server, background, mode):
    future = background.submit(generate, server, 2, LONG_GREEDY)
    wait_until_running(server)
    server.engine.pause(mode)
    server.engine.update_from_disk(server.other_path, version=12, flush_cache=mode == "retract")
    server.engine.resume()
    for completion in future.result(timeout=LIMIT_S):
        if not server.engine.abilities.version_spans:  # then only the last token's weights are known
            assert completion.versions == (VersionSpan(12, 0, 1000),)
            continue
        first, second = completion.versions
        assert (first.version, second.version) == (0, 12)
        assert first.start == 0
        assert 0 < first.end == second.start < second.end == 1000


def test_retraction_is_counted_and_keeps_the_tokens(server, background):
    expected = generate(server, params=LONG_GREEDY)[0]
    body = generate_body(PROMPT, 1, LONG_GREEDY, "r")
    future = background.submit(server.ask, Route.GENERATE, body)
    wait_until_running(server)
    server.engine.pause("retract")
    server.engine.resume()
    reply = future.result(timeout=LIMIT_S).json()
    assert reply["meta_info"]["num_retractions"] == 1
    got = parse_completions(reply, 1)[0]
    assert got.token_ids == expected.token_ids
    assert got.log_probs == pytest.approx(expected.log_probs, abs=CLOSE)


def test_an_unknown_pause_mode_is_refused(server):
    reply = server.ask(Route.PAUSE, {"mode": "softly"})
    assert reply.status_code == 400
    assert "softly" in error_message(reply.text, "")


def test_flush_is_refused_while_requests_run(server, background):
    server.engine.flush_cache()
    future = background.submit(generate, server, 1, LONG)
    wait_until_running(server)
    with pytest.raises(ServerError, match="answered 400"):
        server.engine.flush_cache()
    server.engine.abort(everything=True)
    future.result(timeout=LIMIT_S)


@pytest.mark.parametrize("any_served", [p for p in PARAMS if p.id != "sglang_old"], indirect=True)  # no cache
def test_an_update_that_would_flush_running_requests_is_refused(server, background):
    future = background.submit(generate, server, 1, LONG)
    wait_until_running(server)
    server.engine.pause("in_place")
    before = server.engine.checksums()
    with pytest.raises(ServerError, match="answered 400"):
        server.engine.update_from_disk(server.other_path, version=1, flush_cache=True)
    if server.variant.engine == "hf":  # SGLang refuses only the flush, when the weights are the new ones already
        assert server.engine.checksums() == before
    server.engine.abort(everything=True)
    server.engine.resume()  # what an in_place pause keeps, SGLang aborts only after it
    future.result(timeout=LIMIT_S)


def test_an_update_without_a_pause_waits_for_the_running_requests(server, background):
    future = background.submit(generate, server, 1, LONG_GREEDY)
    wait_until_running(server)
    server.engine.update_from_disk(server.other_path, version=5)
    assert [span.version for span in future.result(timeout=LIMIT_S)[0].versions] == [0]
    assert [span.version for span in generate(server)[0].versions] == [5]


def test_checksums_are_of_the_bytes_of_what_each_rank_holds(server):
    """SGLang keeps some tensors of the folder under their names, and others as parts of larger ones."""
    kind: Kind = "words" if DEVICE == "cuda" else "sha256"
    with safe_open(f"{server.model_path}/model.safetensors", framework="pt") as file:
        expected = {name: digest(file.get_tensor(name), kind) for name in file.keys()}  # noqa: SIM118
    for engine in server.engine.engines:
        ranks = engine.rank_checksums()
        assert len(ranks) == server.variant.tensor_parallel_size
        for checksums in ranks:
            whole = [name for name in expected if name in checksums and is_whole(server, name)]
            assert len(whole) >= 9
            assert {name: checksums[name] for name in whole} == {name: expected[name] for name in whole}
    if server.variant.engine == "hf":
        assert server.engine.checksums() == expected


def is_whole(server, name):
    """Whether every rank of the server holds the whole tensor, unpadded."""
    if server.variant.engine == "hf" or "norm" in name:
        return True
    return server.variant.tensor_parallel_size == 1 and "embed" not in name and "lm_head" not in name


def test_checksums_of_replicas_agree(server):
    assert len({tuple(sorted(engine.checksums().items())) for engine in server.engine.engines}) == 1


def test_checksums_of_one_server_agree_in_one_number(server):
    first = server.ask(Route.WEIGHTS_CHECKER, {"action": "checksum"}).json()["per_engine_checksum"]
    server.engine.update_from_disk(server.other_path, version=1)
    second = server.ask(Route.WEIGHTS_CHECKER, {"action": "checksum"}).json()["per_engine_checksum"]
    assert first != second


def test_an_unknown_checker_action_is_refused(server):
    assert server.ask(Route.WEIGHTS_CHECKER, {"action": "guess"}).status_code == 400


def test_update_from_disk_changes_what_is_written_and_its_stamp(server):
    before = generate(server)[0]
    server.engine.update_from_disk(server.other_path, version=41)
    after = generate(server)[0]
    assert after.versions[0].version == 41
    assert after.log_probs != before.log_probs


def test_update_from_a_missing_folder_is_refused_and_changes_nothing(server):
    before = server.engine.checksums()
    with pytest.raises(ServerError, match="400.*no_such_folder"):
        server.engine.update_from_disk("/no_such_folder", version=1)
    assert server.engine.checksums() == before
    assert server.engine.model_info()["weight_version"] == "0"


@pytest.mark.parametrize("tags", [["kv_cache"], None])
def test_released_memory_comes_back(server, tags):
    before = generate(server)[0]
    server.engine.wait_until_idle()
    server.engine.release_memory(tags)
    server.engine.resume_memory(tags)
    if tags is None and server.variant.engine == "hf" and DEVICE == "cuda":  # its weights are lost, and pushed again
        server.engine.update_from_disk(server.model_path, version=0)
    after = generate(server)[0]
    assert after.token_ids == before.token_ids
    assert after.log_probs == pytest.approx(before.log_probs, abs=CLOSE)


def test_requests_beyond_the_limit_of_running_rows_wait_their_turn(server):
    completions = generate(server, 150, SamplingParams(max_new_tokens=5, ignore_eos=True, sampling_seed=1))
    assert [len(completion.token_ids) for completion in completions] == [5] * 150


def test_update_routes_want_a_session_where_there_are_sessions(server):
    if not server.engine.abilities.update_sessions:
        assert server.ask(Route.BEGIN_UPDATE, {}).status_code == server.ask(Route.END_UPDATE, {}).status_code == 404
        server.engine.begin_update()
        server.engine.end_update()
        return
    reply = server.ask(Route.UPDATE_FROM_DISTRIBUTED, {"names": [], "dtypes": [], "shapes": []})
    assert reply.status_code == 400
    assert "begin_weight_update" in reply.json()["message"]
    assert server.ask(Route.END_UPDATE, {}).status_code == 400
    server.engine.begin_update()
    assert server.ask(Route.BEGIN_UPDATE, {}).status_code == 400
    server.engine.end_update()


def test_leaving_a_group_that_was_never_joined_is_refused(server):
    with pytest.raises(ServerError, match="answered 400"):
        server.engine.destroy_group("nobody")


def test_requests_of_many_threads_are_all_answered(server):
    results: list[int] = []

    def some():
        results.extend(len(generate(server)[0].token_ids) for _ in range(5))

    threads = [threading.Thread(target=some) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert results == [6] * 40
