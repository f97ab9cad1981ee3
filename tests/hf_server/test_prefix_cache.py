"""The prefix cache by itself, against the slow definition: what is found is the KV of exactly these tokens and salt."""

from collections.abc import Hashable, Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.hf_server.kv_cache import KVSlots
from megarl.hf_server.prefix_cache import PrefixCache

LONGEST = 8


def slots(max_tokens: int) -> KVSlots:
    return KVSlots(num_layers=2, num_kv_heads=1, head_dim=3, dtype=torch.float64, max_tokens=max_tokens)


def written(held: KVSlots, slot: int, salt: Hashable, tokens: Sequence[int], weights: int = 0) -> None:
    """What a model with such weights would write: a token's KV depends on all tokens up to it."""
    for number, tensor in enumerate(held.tensors):
        for at in range(len(tokens)):
            tensor[slot, at] = hash((salt, *tokens[: at + 1], number, weights)) % 1009


def keep(cache: PrefixCache, running: KVSlots, tokens: Sequence[int], start: int = 0, weights: int = 0) -> None:
    written(running, 0, "s", tokens, weights)
    cache.store(running, [("s", 0, start, tokens)])


def is_right(cache: PrefixCache, salt: Hashable, tokens: Sequence[int], **of: int) -> bool:
    """Whether what is found has the KV of these tokens; it is loaded into two slots."""
    places = cache.find(salt, tokens)
    running, expected = slots(100), slots(100)
    for held in (running, expected):
        held.reserve(3, LONGEST, used=(0, 0))
    cache.load(running, [(places, [2, 1])])
    for slot in (1, 2):
        written(expected, slot, salt, tokens[: len(places)], **of)
    return all(torch.equal(a, b) for a, b in zip(running.tensors, expected.tensors, strict=True))


def made(max_tokens: int) -> tuple[PrefixCache, KVSlots]:
    running = slots(1000)
    running.reserve(4, LONGEST, used=(0, 0))
    return PrefixCache(slots(max_tokens)), running


SEQUENCE = st.tuples(st.sampled_from(["a", 0, None]), st.lists(st.integers(0, 2), max_size=LONGEST))


@settings(max_examples=40)
@given(batches=st.lists(st.lists(SEQUENCE, max_size=4), max_size=8), max_tokens=st.integers(0, 30))
def test_what_is_found_is_the_kv_of_these_tokens(batches, max_tokens):
    cache, running = made(max_tokens)
    stored: set[tuple[Hashable, ...]] = set()
    for batch in batches:
        for slot, (salt, tokens) in enumerate(batch):
            written(running, slot, salt, tokens)
            stored |= {(salt, *tokens[: at + 1]) for at in range(len(tokens))}
        cache.store(running, [(salt, slot, 0, tokens) for slot, (salt, tokens) in enumerate(batch)])
        assert cache.num_tokens <= cache.capacity <= max_tokens or cache.num_tokens == 0
        assert sorted(cache._places.values()) == list(range(cache.num_tokens))
        for salt, tokens in batch:
            assert is_right(cache, salt, tokens)
            found, prefix = len(cache.find(salt, tokens)), (salt, *tokens)
            if len(stored) <= max_tokens:
                assert found == max(at for at in range(len(tokens) + 1) if at == 0 or prefix[: at + 1] in stored)


def test_the_longest_unused_makes_room_from_its_end():
    cache, running = made(max_tokens=9)
    for tokens in ([1, 2, 3], [1, 2, 4], [5, 6, 7]):  # seven tokens
        keep(cache, running, tokens)
    cache.find("s", [1, 2, 4])
    keep(cache, running, [8, 8, 8, 8])  # two too many: [1, 2, 3] loses its end, and [5, 6, 7] its own
    assert [len(cache.find("s", tokens)) for tokens in ([1, 2, 3], [1, 2, 4], [5, 6, 7])] == [2, 3, 2]
    assert is_right(cache, "s", [8, 8, 8, 8]) and is_right(cache, "s", [5, 6])


def test_a_sequence_longer_than_the_cache_keeps_its_beginning():
    cache, running = made(max_tokens=4)
    keep(cache, running, [1, 2, 3, 4, 5, 6])
    assert len(cache.find("s", [1, 2, 3, 4, 5, 6])) == 4
    assert is_right(cache, "s", [1, 2, 3, 4, 5, 6])


def test_what_is_known_stays_before_the_start_and_is_replaced_from_there_on():
    cache, running = made(max_tokens=20)
    keep(cache, running, [1, 2, 3])
    keep(cache, running, [1, 2, 3], start=3, weights=1)
    assert is_right(cache, "s", [1, 2, 3], weights=0)
    keep(cache, running, [1, 2, 3], start=0, weights=1)
    assert is_right(cache, "s", [1, 2, 3], weights=1)


def test_a_smaller_limit_frees_memory_and_a_larger_one_may_take_it_again():
    cache, running = made(max_tokens=40)
    keep(cache, running, [1, 2, 3])
    assert cache.capacity == 40
    cache.limit(50)
    assert len(cache.find("s", [1, 2, 3])) == 3
    cache.limit(2)
    assert (cache.capacity, cache.num_tokens) == (0, 0)
    keep(cache, running, [1, 2, 3])
    assert cache.capacity == cache.num_tokens == 2
    cache.limit(50)
    keep(cache, running, [1, 2, 3])
    assert is_right(cache, "s", [1, 2, 3]) and len(cache.find("s", [1, 2, 3])) == 3
    cache.clear()
    assert cache.find("s", [1, 2, 3]) == [] and cache.capacity == 0
