"""What every rollout server must answer, whoever wrote it: each route, and each way to be refused."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from safetensors import safe_open

from megarl.rollout.client import EngineError
from megarl.rollout.protocol import Route, SamplingParams, generate_body, parse_completions, tensor_digest

PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=3000, ignore_eos=True, sampling_seed=3)


def generate(server, n=1, params=GREEDY, prompt=PROMPT, rid="r"):
    reply = server.ask(Route.GENERATE, generate_body(prompt, n, params, rid))
    assert reply.status_code == 200, reply.text
    return parse_completions(reply.json(), n)


def wait_until_running(server, count=1):
    deadline = time.monotonic() + 20
    while server.engine.server_info()["internal_states"][0]["num_running_reqs"] < count:
        assert time.monotonic() < deadline, "the request never began to run"
        time.sleep(0.01)


@pytest.fixture
def background():
    with ThreadPoolExecutor(4) as threads:
        yield threads


def test_health_answers_200(server):
    assert server.ask(Route.HEALTH, method="GET").status_code == 200


def test_every_route_wants_the_token(server):
    for route in Route:
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
    assert info["internal_states"][0]["num_running_reqs"] == 0


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
        ({"input_ids": [5, 32]}, "32"),
        ({"input_ids": [5, -1]}, "-1"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[5], []]}, "input_ids"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": [5] * 4095}, "exceed 4096"),
        ({"sampling_params": {"temprature": 1.0}}, "temprature"),
        ({"sampling_params": {"temperature": -0.5}}, "temperature=-0.5"),
        ({"sampling_params": {"top_p": 0}}, "top_p=0"),
        ({"sampling_params": {"top_k": 0}}, "top_k=0"),
        ({"sampling_params": {"n": 0}}, "n=0"),
        ({"sampling_params": {"max_new_tokens": 2.5}}, "max_new_tokens=2.5"),
        ({"sampling_params": {"stop_token_ids": 3}}, "stop_token_ids=3"),
        ({"rid": ["a", "b"]}, "rid"),
    ],
)
def test_a_wrong_request_is_refused_with_a_sentence(server, change, words):
    reply = server.ask(Route.GENERATE, {**generate_body(PROMPT, 1, GREEDY, "r"), **change})
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


def test_a_body_that_is_no_json_object_is_refused(server):
    assert server.ask(Route.GENERATE, [1, 2]).status_code == 400


def test_abort_ends_a_request_with_what_it_wrote(server, background):
    future = background.submit(generate, server, 1, LONG, rid="victim")
    wait_until_running(server)
    server.engine.abort("somebody else")
    server.engine.abort("victim")
    completion = future.result(timeout=20)[0]
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) == len(completion.log_probs) < 3000


def test_abort_all_ends_running_and_waiting_requests(server, background):
    futures = [background.submit(generate, server, 40, LONG, rid=f"r{i}") for i in range(2)]
    wait_until_running(server, count=20)
    time.sleep(0.05)
    server.engine.abort(everything=True)
    reasons = [completion.finish_reason for future in futures for completion in future.result(timeout=20)]
    assert reasons == ["abort"] * 80


def test_a_client_that_hangs_up_ends_its_request(server):
    body = generate_body(PROMPT, 1, LONG, "r")
    with pytest.raises(EngineError, match="Timeout"):
        type(server.engine)(server.url, server.token, timeout_s=0.3)._call(Route.GENERATE, body)
    deadline = time.monotonic() + 5
    while server.engine.server_info()["internal_states"][0]["num_running_reqs"]:
        assert time.monotonic() < deadline, "the abandoned request goes on"
        time.sleep(0.02)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_request_that_comes_during_a_pause_waits_for_its_end(server, background, mode):
    server.engine.pause(mode)
    future = background.submit(generate, server)
    time.sleep(0.15)
    assert not future.done()
    server.engine.resume()
    assert len(future.result(timeout=20)[0].token_ids) == 6


def test_pause_abort_ends_what_runs(server, background):
    future = background.submit(generate, server, 1, LONG)
    wait_until_running(server)
    server.engine.pause("abort")
    assert future.result(timeout=20)[0].finish_reason == "abort"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_an_update_in_mid_generation_shows_in_the_version_spans(server, background, mode):
    params = SamplingParams(max_new_tokens=300, ignore_eos=True, sampling_seed=3)
    future = background.submit(generate, server, 2, params)
    wait_until_running(server)
    server.engine.pause(mode)
    server.engine.update_from_disk(server.other_path, version=12, flush_cache=mode == "retract")
    server.engine.resume()
    for completion in future.result(timeout=30):
        first, second = completion.versions
        assert (first.version, second.version) == (0, 12)
        assert first.start == 0
        assert 0 < first.end == second.start < second.end == 300


def test_retraction_is_counted_and_keeps_the_tokens(server, background):
    params = SamplingParams(max_new_tokens=200, ignore_eos=True, sampling_seed=3)
    want = generate(server, params=params)[0]
    body = generate_body(PROMPT, 1, params, "r")
    future = background.submit(server.ask, Route.GENERATE, body)
    wait_until_running(server)
    server.engine.pause("retract")
    server.engine.resume()
    reply = future.result(timeout=20).json()
    assert reply["meta_info"]["num_retractions"] == 1
    got = parse_completions(reply, 1)[0]
    assert got.token_ids == want.token_ids
    assert got.log_probs == pytest.approx(want.log_probs, abs=1e-5)


def test_an_unknown_pause_mode_is_refused(server):
    reply = server.ask(Route.PAUSE, {"mode": "softly"})
    assert reply.status_code == 400
    assert "softly" in reply.json()["message"]


def test_flush_is_refused_while_requests_run(server, background):
    server.engine.flush_cache()
    future = background.submit(generate, server, 1, LONG)
    wait_until_running(server)
    with pytest.raises(EngineError, match="answered 400"):
        server.engine.flush_cache()
    server.engine.abort(everything=True)
    future.result(timeout=20)


def test_an_update_that_would_flush_running_requests_is_refused(server, background):
    future = background.submit(generate, server, 1, LONG)
    wait_until_running(server)
    server.engine.pause("in_place")
    before = server.engine.checksums()
    with pytest.raises(EngineError, match="answered 400"):
        server.engine.update_from_disk(server.other_path, version=1, flush_cache=True)
    assert server.engine.checksums() == before
    server.engine.abort(everything=True)
    future.result(timeout=20)


def test_an_update_without_a_pause_waits_for_the_running_requests(server, background):
    params = SamplingParams(max_new_tokens=300, ignore_eos=True)
    future = background.submit(generate, server, 1, params)
    wait_until_running(server)
    server.engine.update_from_disk(server.other_path, version=5)
    assert future.done() or future.result(timeout=5)
    assert [span.version for span in future.result()[0].versions] == [0]
    assert [span.version for span in generate(server)[0].versions] == [5]


def test_checksums_are_sha256_of_the_bytes_under_the_folders_names(server):
    with safe_open(f"{server.model_path}/model.safetensors", framework="pt") as file:
        want = {name: tensor_digest(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    assert server.engine.checksums() == want


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
    with pytest.raises(EngineError, match="no_such_folder"):
        server.engine.update_from_disk("/no_such_folder", version=1)
    assert server.engine.checksums() == before
    assert server.engine.model_info()["weight_version"] == "0"


def test_released_memory_comes_back(server, background):
    before = generate(server)[0]
    server.engine.release_memory(["kv_cache"])
    future = background.submit(generate, server)
    time.sleep(0.1)
    assert not future.done()
    server.engine.resume_memory(["kv_cache"])
    assert future.result(timeout=20)[0] == before


def test_an_unknown_memory_tag_is_refused(server):
    with pytest.raises(EngineError, match="hats"):
        server.engine.release_memory(["hats"])


def test_requests_beyond_the_limit_of_running_rows_wait_their_turn(server):
    completions = generate(server, 150, SamplingParams(max_new_tokens=5, ignore_eos=True, sampling_seed=1))
    assert [len(completion.token_ids) for completion in completions] == [5] * 150


def test_update_routes_want_a_session(server):
    body = {"names": [], "dtypes": [], "shapes": []}
    reply = server.ask(Route.UPDATE_FROM_DISTRIBUTED, body)
    assert reply.status_code == 400
    assert Route.BEGIN_UPDATE in reply.json()["message"]
    assert server.ask(Route.END_UPDATE, {}).status_code == 400
    server.engine.begin_update()
    assert server.ask(Route.BEGIN_UPDATE, {}).status_code == 400
    server.engine.end_update()


def test_a_group_that_was_never_joined_is_named(server):
    with pytest.raises(EngineError, match="nobody"):
        server.engine.destroy_group("nobody")


def test_requests_of_many_threads_are_all_answered(server):
    results: list[int] = []

    def some():
        results.extend(len(generate(server)[0].token_ids) for _ in range(5))

    threads = [threading.Thread(target=some) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [6] * 40
