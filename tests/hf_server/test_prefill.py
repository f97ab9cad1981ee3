"""Which requests share a sequence, and which sequences a pass."""

from collections.abc import Sequence
from typing import Any

import torch

from megarl.hf_server.kv_cache import KVSlots
from megarl.hf_server.prefix_cache import PrefillSequence, PrefixCache, distinct, passes
from megarl.hf_server.running_batch import Call, CompletionRequest
from megarl.rollout.protocol import SamplingParams


def request(prompt: Sequence[int], **fields: Any) -> CompletionRequest:
    """One of a call of its own."""
    call = Call()
    call.add(1, "r", list(prompt), SamplingParams(max_new_tokens=3), (), **fields)
    return call.rows[0]


def cache_with(*kept: tuple[str, list[int]]) -> PrefixCache:
    running = KVSlots(1, 1, 1, torch.float32, max_tokens=1000)
    running.reserve(1, 500, used=(0, 0))
    cache = PrefixCache(KVSlots(1, 1, 1, torch.float32, max_tokens=1000))
    cache.store(running, [(salt, 0, 0, tokens) for salt, tokens in kept])
    return cache


def shapes(groups: list[list[PrefillSequence]]) -> list[list[tuple[int, int]]]:
    return [[(fill.num_new, len(fill.rows)) for fill in group] for group in groups]


def test_requests_of_equal_tokens_and_salt_share_a_sequence():
    rows = [request([5, 6], salt=salt) for salt in ("a", "b", "a")]
    rows += [request([5, 6, 7], salt="a"), request([5, 6], salt="a")]
    found = distinct(rows, cache_with())
    assert [(fill.salt, fill.tokens, len(fill.rows)) for fill in found] == [
        ("a", [5, 6], 3),
        ("b", [5, 6], 1),
        ("a", [5, 6, 7], 1),
    ]


def test_all_tokens_but_the_last_may_be_cached():
    cache = cache_with(("a", [5, 6, 7]))
    rows = [request(prompt, salt="a") for prompt in ([5, 6, 7], [5, 6, 7, 8], [5, 9], [4])]
    assert [(len(f.places), f.num_new) for f in distinct(rows, cache)] == [(2, 1), (3, 1), (1, 1), (0, 1)]


def test_a_retracted_request_and_one_with_scores_compute_all_themselves():
    cache = cache_with(("a", [5, 6, 7]))
    retracted, scored, free = request([5, 6, 7], salt="a"), request([5, 6, 7], salt="a"), request([5, 6, 7], salt="a")
    retracted.num_retractions, scored.prompt_log_probs_from = 1, 0
    fills = distinct([retracted, scored, free], cache)
    assert [(fill.rows, fill.num_new) for fill in fills] == [([retracted, scored], 3), ([free], 1)]
    scored.prompt_log_probs = [-1.0, -1.0]
    assert len(distinct([scored, free], cache)) == 1


def test_a_retracted_request_goes_on_behind_its_tokens():
    rows = [request([5, 6], salt="a"), request([5, 6], salt="a")]
    rows[0].token_ids = [7]
    assert [fill.tokens for fill in distinct(rows, cache_with())] == [[5, 6, 7], [5, 6]]


def test_sequences_with_about_as_many_new_tokens_share_a_pass():
    rows = [request(range(length), salt="a") for length in (5, 300, 6, 5) for _ in range(3)]
    groups = passes(distinct(rows, cache_with()), first_slot=10)
    assert shapes(groups) == [[(5, 6), (6, 3)], [(300, 3)]]
    assert [list(fill.slots) for group in groups for fill in group] == [[*range(10, 16)], [16, 17, 18], [19, 20, 21]]


def test_what_is_cached_does_not_count_as_padding():
    long = list(range(300))
    rows = [request([*long, 1], salt="a"), request([7], salt="a"), request([*long[:299], 1, 1], salt="a")]
    assert shapes(passes(distinct(rows, cache_with(("a", long))), 0)) == [[(1, 1), (1, 1), (2, 1)]]


def test_a_pass_is_bounded_by_its_tokens_and_by_what_they_attend_to():
    def fill(cached: int, new: int) -> PrefillSequence:
        return PrefillSequence([request([1])], "a", [0] * (cached + new), [0] * cached)

    assert [len(group) for group in passes([fill(0, 4096) for _ in range(5)], 0)] == [2, 2, 1]
    assert [len(group) for group in passes([fill(65_536, 256) for _ in range(5)], 0)] == [3, 2]
    assert [len(group) for group in passes([fill(0, 9000)], 0)] == [1], "one alone is never refused"
