"""What every rollout server must answer, whoever wrote it: each route, and each way to be refused.

Where stock SGLang dies of a request instead of refusing it, our side never sends that request:
`test_hf_server_refusals` has what our own server says to it, `test_pool` and `test_protocol` that it is not sent.
"""

import asyncio
import time
import uuid
from concurrent.futures import wait

import aiohttp
import pytest
from safetensors import safe_open
from spawn import DEVICE
from tiny_server import BOTH, LIMIT_S, TRUSTED, against
from wire import parse_completions

from megarl.rollout.client import Load, ServerError
from megarl.rollout.protocol import Route, SamplingParams, auth_headers, error_message, generate_body
from megarl.samples.sample import VersionSpan
from megarl.weights.verify.digests import Kind, digest

PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=3000, ignore_eos=True, sampling_seed=3)
REFUSED = (400, 422)  # the second by the router
# Between log-probs of the same tokens, read in one pass or written one by one: GPUs sum in another order for each size.
CLOSE = 1e-4 if DEVICE == "cuda" else 1e-5
LONG_GREEDY = SamplingParams(temperature=0, max_new_tokens=1000, ignore_eos=True)


def generate(server, n=1, params=GREEDY, prompt=PROMPT, rid=None):
    reply = server.ask(Route.GENERATE, generate_body(prompt, n, params, rid or uuid.uuid4().hex))
    assert reply.status_code == 200, reply.text
    return parse_completions(reply.json(), n)


@pytest.fixture
def begun(server, background):
    """Begins a request, and returns its future when all of its completions are being written."""

    def begin(params=LONG, n=1, rid=None):
        future = background.submit(generate, server, n, params, rid=rid)
        server.wait_until_writing(len(PROMPT), n)
        return future

    yield begin
    server.engine.abort(everything=True)


def test_every_route_but_health_wants_the_token(server):
    assert server.ask(Route.HEALTH, method="GET").status_code == 200
    for route in set(Route) - {Route.HEALTH}:
        for token in ("", "wrong", server.token + "x"):
            assert server.ask(route, {}, token=token).status_code == 401, route


def test_a_server_tells_its_version_its_folder_and_its_states(server):
    info = server.engine.model_info()
    assert info["model_path"] == server.model_path
    assert info["weight_version"] == "0"
    assert info["is_generation"] is True
    info = server.engine.server_info()
    assert info["version"] and info["internal_states"]
    assert server.num_running() == 0


def test_the_load_is_that_of_the_running_requests(server, begun):
    future = begun(n=4)
    deadline = time.monotonic() + LIMIT_S
    loads: list[Load] = []
    while sum(load.running for load in loads) < 4:  # SGLang says what its last batch was
        assert time.monotonic() < deadline, loads
        loads = [load for engine in server.engine.engines for load in engine.loads()]
        assert not future.done(), loads
    assert all(load.waiting >= 0 for load in loads)
    assert 0 < sum(load.kv_share for load in loads) <= len(loads)


@against(*BOTH, "sglang_old", "sglang_smg")
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


@against(*BOTH, "sglang_smg")
def test_several_prompts_and_n_give_a_flat_list_prompt_after_prompt(server):
    for prompts in ([[5, 6, 7], [9, 10, 11, 12], [13]], [PROMPT]):
        body = {"input_ids": prompts, "sampling_params": GREEDY.to_json(2)}
        items = server.ask(Route.GENERATE, body).json()
        alone = [generate(server, prompt=prompt)[0].token_ids for prompt in prompts]
        assert [item["output_ids"] for item in items] == [tokens for tokens in alone for _ in range(2)]
        assert "output_token_logprobs" not in items[0]["meta_info"], "they were not asked for"


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
@against(*BOTH, "sglang_smg")
def test_a_wrong_request_is_refused_with_a_sentence(server, change, words):
    reply = server.ask(Route.GENERATE, {**generate_body(PROMPT, 1, GREEDY, "r"), **change})
    assert reply.status_code in REFUSED
    assert words in error_message(reply.text, "")


@pytest.mark.parametrize(
    ("route", "body", "codes", "words"),
    [
        ("/no_such_route", {}, (404,), ""),
        (Route.GENERATE, [1, 2], REFUSED, ""),  # no JSON object
        (Route.PAUSE, {"mode": "softly"}, (400,), "softly"),
        (Route.WEIGHTS_CHECKER, {"action": "guess"}, (400,), ""),
        (Route.DESTROY_GROUP, {"group_name": "nobody"}, (400,), ""),  # it was never joined
    ],
)
def test_what_a_server_does_not_know_is_refused(server, route, body, codes, words):
    reply = server.ask(route, body)
    assert reply.status_code in codes
    assert words in error_message(reply.text, "")


@against(*BOTH, "sglang_smg")
def test_abort_ends_a_request_with_what_it_wrote(server, begun):
    future = begun(rid="victim")
    server.engine.abort("somebody else")
    server.engine.abort("victim")
    completion = future.result(timeout=LIMIT_S)[0]
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) == len(completion.log_probs) < 3000


@against(*BOTH, "sglang_old")
def test_abort_all_ends_running_and_waiting_requests(server, background):
    bodies = [generate_body(PROMPT, 40, LONG, f"r{i}") for i in range(2)]
    futures = [background.submit(server.ask, Route.GENERATE, body) for body in bodies]
    server.wait_until_writing(len(PROMPT), 20)
    deadline = time.monotonic() + LIMIT_S
    while wait(futures, timeout=0.2).not_done and time.monotonic() < deadline:
        server.engine.abort(everything=True)  # once more: a request may still have been on its way
    for reply in (future.result(timeout=0) for future in futures):
        if reply.status_code != 499:  # which 0.5.17 says of a request that it had not given to a scheduler yet
            assert reply.status_code == 200, reply.text
            assert [completion.finish_reason for completion in parse_completions(reply.json(), 40)] == ["abort"] * 40


@against(*BOTH, "sglang_smg")
def test_a_client_that_hangs_up_ends_its_request(server, begun):
    """An equal request that began before it would be done first, if the abandoned one went on."""
    before = begun()

    async def hang_up():
        body, headers = generate_body(PROMPT, 1, LONG, "abandoned"), auth_headers(server.token)
        async with aiohttp.ClientSession() as session:
            url = next(server.turns) + Route.GENERATE
            asked = asyncio.create_task(session.post(url, json=body, headers=headers, ssl=TRUSTED))
            await asyncio.to_thread(server.wait_until_writing, len(PROMPT), 2)
            asked.cancel()

    asyncio.run(hang_up())
    while server.num_running() > 1:
        time.sleep(0.01)
    assert not before.done(), "the abandoned request went on"


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


def test_pause_abort_ends_what_runs(server, begun):
    future = begun()
    server.engine.pause("abort")
    assert future.result(timeout=LIMIT_S)[0].finish_reason == "abort"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@against(*BOTH, "sglang_old", "sglang_smg")
def test_an_update_in_mid_generation_shows_in_the_version_spans(server, begun, mode):
    future = begun(LONG_GREEDY, n=2)
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
    server.wait_until_writing(len(PROMPT))
    server.engine.pause("retract")
    server.engine.resume()
    reply = future.result(timeout=LIMIT_S).json()
    assert reply["meta_info"]["num_retractions"] == 1
    got = parse_completions(reply, 1)[0]
    assert got.token_ids == expected.token_ids
    assert got.log_probs == pytest.approx(expected.log_probs, abs=CLOSE)


def test_flush_is_refused_while_requests_run(server, begun):
    server.engine.flush_cache()
    begun()
    with pytest.raises(ServerError, match="answered 400"):
        server.engine.flush_cache()


def test_an_update_that_would_flush_running_requests_is_refused(server, begun):
    future = begun()
    server.engine.pause("in_place")
    before = server.engine.checksums()
    with pytest.raises(ServerError, match="answered 400"):
        server.engine.update_from_disk(server.other_path, version=1, flush_cache=True)
    if server.variant.engine == "hf":  # SGLang refuses only the flush, when the weights are the new ones already
        assert server.engine.checksums() == before
    server.engine.abort(everything=True)
    server.engine.resume()  # what an in_place pause keeps, SGLang aborts only after it
    future.result(timeout=LIMIT_S)


def test_an_update_without_a_pause_waits_for_the_running_requests(server, begun):
    future = begun(LONG_GREEDY)
    server.engine.update_from_disk(server.other_path, version=5)
    assert [span.version for span in future.result(timeout=LIMIT_S)[0].versions] == [0]
    assert [span.version for span in generate(server)[0].versions] == [5]


@against(*BOTH, "sglang_old", "sglang_tp2", "sglang_smg")
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
        assert engine.checksums() == server.checksums, "servers of one folder agree"
    if server.variant.engine == "hf":
        assert server.checksums == expected


def is_whole(server, name):
    """Whether every rank of the server holds the whole tensor, unpadded."""
    if server.variant.engine == "hf" or "norm" in name:
        return True
    return server.variant.tensor_parallel_size == 1 and "embed" not in name and "lm_head" not in name


@against(*BOTH, "sglang_old", "sglang_tp2")
def test_update_from_disk_changes_what_is_written_its_stamp_and_the_checksum_of_all(server):
    def of_all():
        return server.ask(Route.WEIGHTS_CHECKER, {"action": "checksum"}).json()["per_engine_checksum"]

    before, first = generate(server)[0], of_all()
    server.engine.update_from_disk(server.other_path, version=41)
    after = generate(server)[0]
    assert after.versions[0].version == 41
    assert after.log_probs != before.log_probs
    assert of_all() != first


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


@against(*BOTH, "sglang_old")
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
