"""The prefix cache of every rollout server: it saves prefills, and its salt keeps KV of different weights apart."""

import asyncio
import uuid
from dataclasses import replace

import pytest
import torch
from states import trusted
from tiny_server import BOTH, LIMIT_S, against
from transformers import Qwen3ForCausalLM
from wire import parse_completions

from megarl.rollout.continuation import generate_completion
from megarl.rollout.pool import sender
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.pool.pool_server import PieceRequest
from megarl.rollout.protocol import Route, SamplingParams, auth_headers, generate_body, parse_replies
from megarl.rollout.settings import GenerationSettings

PROMPT = [5, 6, 7, 8, 20, 11, 30, 3, 9, 14, 25, 4, 17, 2, 28, 13]
GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
LONG_GREEDY = SamplingParams(temperature=0, max_new_tokens=1000, ignore_eos=True)
CLOSE = 1e-4  # between log-probs of the same weights; of other weights they differ by more than FAR
FAR = 1e-2


@pytest.fixture
def salt():
    """One that no other test uses."""
    return uuid.uuid4().hex


@pytest.fixture(scope="session")
def after(other_path):
    """transformers' own forward pass over the weights of the push."""
    return Qwen3ForCausalLM.from_pretrained(other_path).eval()


def generate(server, prompt, salt, params=GREEDY, rid=None, url=None):
    """One reply of the first server, or of the one at the url."""
    body = generate_body(prompt, 1, params, rid or uuid.uuid4().hex, salt)
    reply = server.http.post((url or server.url) + Route.GENERATE, json=body, headers=auth_headers(server.token))
    assert reply.status_code == 200, reply.text
    return parse_replies(reply.json(), 1)[0]


def caches(server):
    """Whether it has a prefix cache at all."""
    return server.engine.abilities.flush_beside_queue


def read_by(model, prompt, completion):
    """The log-probs of a completion by transformers."""
    tokens = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        log_probs = torch.log_softmax(model(tokens).logits[0, len(prompt) - 1 : -1].float(), -1)
    return log_probs.gather(1, tokens[0, len(prompt) :, None])[:, 0]


def distance(model, prompt, completion, start=0):
    """The largest difference of its log-probs from those of transformers, from token `start` on."""
    return (torch.tensor(completion.log_probs) - read_by(model, prompt, completion))[start:].abs().max().item()


def push(server, mode, flush_cache):
    server.engine.pause(mode)
    server.engine.update_from_disk(server.other_path, version=1, flush_cache=flush_cache)
    server.engine.resume()


@against(*BOTH, "sglang_old")  # which has no prefix cache
def test_answers_of_one_prompt_share_its_prefill(server, reference, background, salt):
    first = generate(server, PROMPT, salt)
    rest = [future.result() for future in [background.submit(generate, server, PROMPT, salt) for _ in range(3)]]
    assert first.cached_tokens == 0
    assert [reply.cached_tokens for reply in rest] == [len(PROMPT) - 1 if caches(server) else 0] * 3
    assert max(distance(reference, PROMPT, reply.completion) for reply in (first, *rest)) < CLOSE


def test_a_completion_in_pieces_prefills_only_its_last_token(server, reference, salt):
    whole = generate(server, PROMPT, salt, SamplingParams(temperature=0, max_new_tokens=18, ignore_eos=True)).completion
    tokens = []
    for number in range(3):
        piece = generate(server, [*PROMPT, *tokens], f"{salt} in pieces")
        if number and caches(server):
            assert piece.cached_tokens == len(PROMPT) + len(tokens) - 1
        tokens += piece.completion.token_ids
        assert distance(reference, [*PROMPT, *tokens[:-6]], piece.completion) < CLOSE
    assert tokens == whole.token_ids


@against(*BOTH, "sglang_old")
def test_after_a_push_a_new_salt_begins_afresh_and_the_old_one_is_stale(server, after, salt):
    generate(server, PROMPT, f"{salt} 0")
    push(server, "in_place", flush_cache=False)
    fresh, stale = (generate(server, PROMPT, f"{salt} {version}") for version in (1, 0))
    assert fresh.cached_tokens == 0
    assert fresh.completion.versions[0].version == 1
    assert distance(after, PROMPT, fresh.completion) < CLOSE
    if caches(server):  # so this test would see a salt that does nothing
        assert stale.cached_tokens == len(PROMPT) - 1
        assert distance(after, PROMPT, stale.completion) > FAR


def test_what_was_written_through_a_push_is_read_anew_under_the_new_salt(server, after, background, salt):
    future = background.submit(generate, server, PROMPT, f"{salt} 0", LONG_GREEDY)
    server.wait_until_writing(len(PROMPT))
    push(server, "in_place", flush_cache=False)
    piece = [*PROMPT, *future.result(timeout=LIMIT_S).completion.token_ids]
    assert len(piece) == len(PROMPT) + 1000
    fresh = generate(server, piece, f"{salt} 1")
    assert fresh.cached_tokens == 0
    assert distance(after, piece, fresh.completion) < CLOSE


@against(*BOTH, "sglang_old")
def test_a_retracted_request_goes_on_with_kv_of_the_new_weights_alone(server, after, background, salt):
    generate(server, PROMPT, salt)
    future = background.submit(generate, server, PROMPT, salt, LONG_GREEDY)
    server.wait_until_writing(len(PROMPT))
    push(server, "retract", flush_cache=True)
    completion = future.result(timeout=LIMIT_S).completion
    if server.engine.abilities.version_spans:
        old, new = completion.versions
        assert (old.version, new.version) == (0, 1)
        assert distance(after, PROMPT, completion, start=new.start) < CLOSE
    assert distance(after, PROMPT, completion) > FAR, "it began with the old weights"
    assert distance(after, PROMPT, generate(server, PROMPT, salt).completion) < CLOSE, "the push emptied the cache"


@pytest.fixture
def cached(monkeypatch):
    """(tokens asked with, of these in the prefix cache) of each reply that a pool reads, in their order."""
    seen = []

    def noted(reply, n, *, num_asked, **how):
        replies = parse_replies(reply, n, num_asked=num_asked, **how)
        seen.extend((num_asked, reply.cached_tokens) for reply in replies)
        return replies

    monkeypatch.setattr(sender, "parse_replies", noted)
    return seen


@against(*BOTH, "sglang_old")
def test_a_completion_finds_its_prefix_after_an_in_place_push_and_a_new_one_begins_afresh(server, cached):
    async def ask():
        async with EnginePool(
            [server.url], server.token, GenerationSettings(timeout_s=LIMIT_S, salted=True, fenced=True)
        ) as pool:
            pool.update(trusted(server.url, 0))
            piece = (await pool.generate(PieceRequest(PROMPT, GREEDY))).completion
            await asyncio.to_thread(push, server, "in_place", flush_cache=False)
            pool.update(trusted(server.url, 1))
            await pool.generate(PieceRequest([*PROMPT, *piece.token_ids], GREEDY, began=piece.versions[0].version))
            await pool.generate(PieceRequest(PROMPT, GREEDY))
            return pool.counters()

    counters = asyncio.run(ask())
    assert counters["pieces"] == 3 and counters["stale_prefixes"] == 0
    length = len(PROMPT) + GREEDY.max_new_tokens
    assert cached == [(len(PROMPT), 0), (length, length - 1 if caches(server) else 0), (len(PROMPT), 0)]


def test_an_aborted_request_goes_on_where_it_ended(server, reference, background, salt):
    future = background.submit(generate, server, PROMPT, salt, LONG_GREEDY, rid="ended")
    server.wait_until_writing(len(PROMPT))
    server.engine.abort("ended")
    first = future.result(timeout=LIMIT_S).completion
    assert first.finish_reason == "abort"
    piece = [*PROMPT, *first.token_ids]
    second = generate(server, piece, salt)
    if caches(server):
        assert second.cached_tokens >= len(PROMPT)
    if server.variant.engine == "hf":
        assert second.cached_tokens == len(piece) - 1
    assert distance(reference, piece, second.completion) < CLOSE


def test_prompt_log_probs_are_whole_although_the_prompt_is_cached(server, reference):
    generate(server, PROMPT, None)
    found = server.engine.prompt_log_probs(PROMPT)
    with torch.no_grad():
        log_probs = torch.log_softmax(reference(torch.tensor([PROMPT])).logits[0, :-1], -1)
    expected = log_probs.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    assert found == pytest.approx(expected.tolist(), abs=CLOSE)


def test_flush_cache_empties_it(server, salt):
    generate(server, PROMPT, salt)
    server.engine.wait_until_idle()
    assert generate(server, PROMPT, salt).cached_tokens == 0


@against("sglang_smg")
def test_the_router_passes_the_salt_on(server, salt):
    for url in server.urls:
        generate(server, PROMPT, None, url=url)
        assert generate(server, PROMPT, None, url=url).cached_tokens > 0
    assert generate(server, PROMPT, salt, url=server.generate_urls[0]).cached_tokens == 0


@against("sglang_smg")
def test_pieces_of_a_session_find_their_prefix_behind_the_router(server, cached):
    """Two servers and eight sessions: without their keys each piece is on the wrong server with probability 1/2."""
    (url,) = server.generate_urls
    prompts = [[*PROMPT, 2 + number] for number in range(8)]

    async def ask():
        async with EnginePool([url], server.token, GenerationSettings(timeout_s=LIMIT_S, piece_tokens=4)) as pool:

            async def one(prompt):
                with pool.session(1) as affinity:
                    params = replace(GREEDY, max_new_tokens=12)
                    await generate_completion(pool, prompt, params, affinity=affinity)

            await asyncio.gather(*map(one, prompts))

    asyncio.run(ask())
    later = [(asked, found) for asked, found in cached if asked > len(prompts[0])]
    assert len(later) == 2 * len(prompts) and all(found == asked - 1 for asked, found in later), later


@against("sglang_smg")
def test_the_router_passes_the_data_parallel_rank_of_a_prefix_on(server):
    """The server refuses one that it does not have, so it has got it."""
    body = generate_body(PROMPT, 1, GREEDY, uuid.uuid4().hex, dp_rank=5)
    assert "routed_dp_rank=5 out of range" in server.ask(Route.GENERATE, body).text


def test_a_salt_for_each_prompt(server, salt):
    body = {"input_ids": [PROMPT, PROMPT], "sampling_params": GREEDY.to_json(), "return_logprob": True}
    generate(server, PROMPT, f"{salt} 1")
    salts = [f"{salt} 1", f"{salt} 2"]
    reply = server.ask(Route.GENERATE, {**body, "cache_salt": salts}).json()
    cached = [parsed.cached_tokens for parsed in parse_replies(reply, 2)]
    assert cached == ([len(PROMPT) - 1, 0] if caches(server) else [0, 0])
    assert len({tuple(completion.token_ids) for completion in parse_completions(reply, 2)}) == 1
