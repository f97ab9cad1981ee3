"""The prefix cache in the engine: what it saves; it changes no log-prob, and nobody gets KV of other weights."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hf_engine import body, running

from megarl.hf_server.model import HFModel
from megarl.hf_server.scheduler import CACHE, WEIGHTS, HFEngine
from megarl.rollout.protocol import Reply, parse_replies
from megarl.samples.sample import Completion

PROMPT = [5, 9, 3, 20, 7, 7, 12, 30, 2, 4, 11, 8]
WRITE: dict[str, Any] = {"max_new_tokens": 8, "sampling_seed": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(model_path: str) -> HFModel:
    return HFModel(model_path, torch.float32)


@pytest.fixture
def changing(model_path: str, other_path: str) -> HFModel:
    """A model of its own for tests that change the weights."""
    return HFModel(model_path, torch.float32)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Padded tokens of each prefill pass."""
    found: list[int] = []
    prefill = HFModel.prefill

    def counted(self: HFModel, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        found.append(tokens.numel())
        return prefill(self, tokens, cache)

    monkeypatch.setattr(HFModel, "prefill", counted)
    yield found


def alone(model: HFModel, prompt: Sequence[int], **params: Any) -> Reply:
    """What an engine says that was never asked before."""
    with running(model) as (_, answer):
        return parse_replies(answer([body(prompt, **{**WRITE, **params})])[0], 1)[0]


def equal(one: Reply, other: Reply) -> bool:
    a, b = one.completion, other.completion
    return a.token_ids == b.token_ids and a.log_probs == pytest.approx(b.log_probs, abs=1e-5)


def load(engine: HFEngine, folder: str, version: str, *, flush: bool = False) -> None:
    tensors = engine.model.read_folder(folder)
    engine.run_alone(lambda: engine.load(lambda: engine.model.load_weights(tensors), version, flush=flush)).result(30)


def order(engine: HFEngine, what: Any) -> None:
    engine.run_now(what).result(30)


def test_equal_prompts_are_prefilled_once_also_where_some_wait_for_a_slot(model, computed):
    with running(model, max_running=2) as (_, answer):
        (reply,) = answer([body(PROMPT, 6, "3", **WRITE)])
    assert computed == [12, 1, 1], "two slots at a time"
    assert [item["meta_info"]["cached_tokens"] for item in reply] == [0, 11, 11, 11, 11, 11]
    assert {item["meta_info"]["prompt_tokens"] for item in reply} == {12}
    computed.clear()
    with running(model) as (_, answer):
        replies = [parse_replies(reply, 1)[0] for reply in answer([body(PROMPT, 1, "3", **WRITE) for _ in range(5)])]
    assert computed == [12], "those of separate requests"
    assert all(equal(reply, replies[0]) for reply in replies)


@pytest.mark.parametrize("params", [{"temperature": 0.9}, {"top_p": 0.8}, {"temperature": 0.0}])
def test_a_completion_in_pieces_is_the_one_written_at_once(model, computed, params):
    whole = alone(model, PROMPT, max_new_tokens=11, **params).completion
    computed.clear()
    tokens, log_probs = [], []
    with running(model) as (_, answer):
        for size in (4, 1, 6):
            piece = body([*PROMPT, *tokens], 1, "3", **{**WRITE, "max_new_tokens": size, **params})
            completion = parse_replies(answer([piece])[0], 1)[0].completion
            tokens += completion.token_ids
            log_probs += completion.log_probs
    assert tokens == whole.token_ids
    assert log_probs == pytest.approx(whole.log_probs, abs=1e-5)
    assert computed == [12, 1, 1]


def test_salts_keep_apart(model):
    lists = {**body([], **WRITE), "input_ids": [PROMPT, PROMPT], "cache_salt": ["8", "9"]}
    with running(model) as (_, answer):
        assert [item["meta_info"]["cached_tokens"] for item in answer([lists])[0]] == [0, 0], "one for each of a list"
        for expected in (0, 11):
            for salt in (None, "1", "2"):
                assert answer([body(PROMPT, 1, salt, **WRITE)])[0]["meta_info"]["cached_tokens"] == expected
        assert answer([body(PROMPT, 1, "", **WRITE)])[0]["meta_info"]["cached_tokens"] == 11, "an empty one is none"


@pytest.mark.parametrize("salt", [None, "1"])
def test_after_new_weights_only_the_old_salt_finds_kv_of_earlier_ones(changing, other_path, salt):
    with running(changing) as (engine, answer):
        answer([body(PROMPT, 1, salt, **WRITE)])
        load(engine, other_path, "2")
        again, fresh = (parse_replies(answer([body(PROMPT, 1, s, **WRITE)])[0], 1)[0] for s in (salt, "2"))
    expected = alone(HFModel(other_path, torch.float32), PROMPT)
    assert (again.cached_tokens, fresh.cached_tokens) == (11 if salt else 0, 0)
    assert equal(fresh, expected) and equal(again, expected) == (salt is None)


def at_step(engine: HFEngine, number: int, do: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Future[object]:
    """Order `do` while the engine decodes for the `number`th time from now on: it runs after that step."""
    decode, steps, done = engine.model.decode, itertools.count(1), Future[object]()

    def watched(*args: Any) -> torch.Tensor:
        if next(steps) == number:
            engine.run_now(do).add_done_callback(lambda ran: done.set_result(ran.result()))
        return decode(*args)

    monkeypatch.setattr(engine.model, "decode", watched)
    return done


def changed(engine: HFEngine, folder: str, mode: str) -> Callable[[], None]:
    """A push that keeps the prefix cache, under a pause."""
    tensors = engine.model.read_folder(folder)

    def push() -> None:
        engine.pause(mode)
        engine.load(lambda: engine.model.load_weights(tensors), "2", flush=False)
        engine.resume()

    return push


def read_by(model: HFModel, completion: Completion) -> list[float]:
    """The log-probs of a completion of PROMPT, all read in one pass."""
    tokens = [*PROMPT, *completion.token_ids]
    scored = {**body(tokens, max_new_tokens=1), "logprob_start_len": len(PROMPT) - 1}
    with running(model) as (_, answer):
        return [triple[0] for triple in answer([scored])[0]["meta_info"]["input_token_logprobs"]][1:]


@pytest.mark.parametrize("salt", [None, "1"])
def test_a_retracted_request_goes_on_without_kv_of_earlier_weights(changing, other_path, salt, monkeypatch):
    with running(changing) as (engine, answer):
        answer([body(PROMPT, 1, salt, **WRITE)])  # its KV is what a retracted request must not find
        done = at_step(engine, 3, changed(engine, other_path, "retract"), monkeypatch)
        reply = answer([body(PROMPT, 1, salt, **WRITE)])[0]
        done.result(30)
    completion = parse_replies(reply, 1)[0].completion
    assert [(span.version, span.start) for span in completion.versions] == [(0, 0), (2, 4)]
    assert reply["meta_info"]["num_retractions"] == 1 and reply["meta_info"]["cached_tokens"] == 11
    after = read_by(HFModel(other_path, torch.float32), completion)[4:]
    assert completion.log_probs[4:] == pytest.approx(after, abs=1e-5)


@pytest.mark.parametrize("salt", [None, "1"])
def test_kv_of_two_versions_is_found_by_none_but_its_own_salt(changing, other_path, salt, monkeypatch):
    with running(changing) as (engine, answer):
        done = at_step(engine, 3, changed(engine, other_path, "in_place"), monkeypatch)
        completion = parse_replies(answer([body(PROMPT, 1, salt, **WRITE)])[0], 1)[0].completion
        done.result(30)
        piece = [*PROMPT, *completion.token_ids]
        own, new, none = (parse_replies(answer([body(piece, 1, s, **WRITE)])[0], 1)[0] for s in ("1", "2", None))
    other = HFModel(other_path, torch.float32)
    assert completion.log_probs[4:] != pytest.approx(read_by(other, completion)[4:], abs=1e-3), "old KV, new weights"
    expected = alone(other, piece)
    assert (new.cached_tokens, none.cached_tokens) == (0, 0)
    assert equal(new, expected) and equal(none, expected)
    assert (own.cached_tokens, equal(own, expected)) == ((19, False) if salt else (0, True))


def test_released_and_flushed_kv_is_gone(model):
    with running(model) as (engine, answer):
        for forget in (engine.flush_cache, lambda: engine.release([CACHE, WEIGHTS])):
            answer([body(PROMPT, 1, "1", **WRITE)])
            assert engine._prefixes.num_tokens == 12 and len(engine._left) == 1
            order(engine, forget)
            assert engine._prefixes.num_tokens == engine._prefixes.capacity == len(engine._left) == 0
        order(engine, lambda: engine.take_back([CACHE, WEIGHTS]))
        assert answer([body(PROMPT, 1, "1", **WRITE)])[0]["meta_info"]["cached_tokens"] == 0


def test_a_push_that_flushes_empties_it_and_one_that_does_not_keeps_it(changing, other_path):
    with running(changing) as (engine, answer):
        for flush, kept in ((False, 12), (True, 0)):
            answer([body(PROMPT, 1, "1", **WRITE)])
            load(engine, other_path, "2", flush=flush)
            assert engine._prefixes.num_tokens == kept and bool(engine._left) == bool(kept)


def test_what_ends_last_is_kept_when_others_come_and_what_ends_before_at_once(model):
    """So a push that flushes finds nothing of the last answers that would have been copied for it alone."""
    with running(model) as (engine, answer):
        short, long = body(PROMPT, 1, "1", **{**WRITE, "max_new_tokens": 3}), body([6, *PROMPT], 1, "1", **WRITE)
        first, second = (parse_replies(reply, 1)[0].completion for reply in answer([short, long]))
        assert engine._prefixes.num_tokens == 12 + 2 + 13 and len(engine._left) == 1
        again = [body([*p, *done.token_ids], 1, "1", **WRITE) for p, done in ((PROMPT, first), ([6, *PROMPT], second))]
        assert [reply["meta_info"]["cached_tokens"] for reply in answer(again)] == [12 + 2, 13 + 7]


def test_running_requests_come_first_and_the_cache_has_what_they_leave(model):
    """Of 40 tokens it has 10 at most: two rows of 20 leave none, one of 37 leaves 3, two of 14, made 16, leave 8."""
    with running(model, max_total_tokens=40) as (engine, answer):
        for n, max_new_tokens, capacity in ((2, 8, 0), (1, 25, 3), (2, 2, 8), (1, 8, 8), (1, 25, 3)):
            (reply,) = answer([body(PROMPT, n, "1", **{**WRITE, "max_new_tokens": max_new_tokens})])
            assert len(reply if n > 1 else [reply]) == n
            assert engine._prefixes.capacity == capacity
            assert math.prod(engine._cache.size) + capacity <= 40
