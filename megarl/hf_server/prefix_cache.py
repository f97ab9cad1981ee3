"""The prefix cache: KV of sequences that were prefilled or generated, for later ones that begin with the same tokens.

A sequence is found by its salt and its tokens, one token after the other; sequences that begin alike share what they
have in common.  KV of one salt is never used for another.  Each token is kept at a place, which is a position in the
only slot of a `KVSlots`.

`distinct` and `passes` plan a prefill: the distinct sequences of admitted requests, and which of them share a pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from megarl.hf_server.kv_cache import KVSlots
from megarl.hf_server.running_batch import CompletionRequest

_FIRST_TOKENS = 1 << 10  # the first allocation; each further one doubles it
_MAX_TOKENS = 8192  # padded new tokens of a pass, and its attention's scores a head their square: bounds the memory
_FREE_PADDING, _MAX_PADDING = 64, 0.25  # sequences share a pass while padding is at most this many tokens or this share

Written = tuple[Hashable, int, int, Sequence[int]]  # salt, slot, start, tokens: see PrefixCache.store
_Key = tuple[int | tuple[Hashable], int]  # place of the token before it, or the salt; token


class PrefixCache:
    """As many tokens as its memory may hold; the one that was not used for the longest time makes room.

    Example: cache = PrefixCache(model.new_cache(1000))
             cache.store(running, [("3", 4, 0, [5, 6, 7])])  # slot 4 of `running` holds three tokens of salt "3"
             cache.load(running, [(cache.find("3", [5, 6, 9]), [1, 2])])  # two of them into slots 1 and 2
    """

    def __init__(self, kept: KVSlots) -> None:
        """`kept`: empty, and used by this cache alone."""
        self._kept = kept
        # The place of each token, by that of the token before it, in the order of the last use, the latest at the end.
        # A use of a token is one of all tokens before it, and these come after it: nothing follows the token of the
        # first entry, which may be forgotten.
        self._places: OrderedDict[_Key, int] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        return len(self._places)

    @property
    def capacity(self) -> int:
        """For how many tokens memory is allocated."""
        return self._kept.size[1]

    def clear(self) -> None:
        """Forget all tokens and free their memory."""
        self._places.clear()
        self._kept.free()

    def limit(self, max_tokens: int) -> None:
        """Take no more memory than that of so many tokens; if more is allocated, everything is forgotten."""
        self._kept.max_tokens = max_tokens
        if self.capacity > max_tokens:
            self.clear()

    def find(self, salt: Hashable, tokens: Sequence[int]) -> list[int]:
        """The places of the first tokens, as many as are kept."""
        places = self._known(salt, tokens)
        self._use(salt, tokens, places)
        return places

    def _known(self, salt: Hashable, tokens: Sequence[int]) -> list[int]:
        places: list[int] = []
        before: int | tuple[Hashable] = (salt,)
        for token in tokens:
            place = self._places.get((before, token))
            if place is None:
                break
            places.append(place)
            before = place
        return places

    def load(self, slots: KVSlots, wanted: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Copy the tokens at these places to the first positions of each of these slots, for each pair of both."""
        taken: list[int] = []
        slot: list[int] = []
        at: list[int] = []
        for places, numbers in wanted:
            for number in numbers:
                taken += places
                slot += [number] * len(places)
                at += range(len(places))
        where = torch.tensor([taken, slot, at], dtype=torch.int64)
        slots.copy(self._kept, (torch.zeros_like(where[0]), where[0]), (where[1], where[2]))

    def store(self, slots: KVSlots, written: Iterable[Written]) -> None:
        """Keep the first tokens of slots, as many as fit: (salt, slot, start, tokens) for each.

        A token that is kept already stays as it is before the position `start`, and is replaced from there on.
        """
        sources: dict[int, tuple[int, int]] = {}  # place -> slot and position; of a place that is taken twice the last
        for salt, number, start, all_tokens in written:
            tokens = all_tokens[: self._kept.max_tokens]
            places = self._known(salt, tokens)
            first = min(start, len(places))
            if self.num_tokens + len(tokens) > self._kept.max_tokens:
                self._use(salt, tokens, places)  # first, so that none of them makes room for the others
            for token in tokens[len(places) :]:
                free = self._free_place()
                self._places[places[-1] if places else (salt,), token] = free
                places.append(free)
            self._use(salt, tokens, places)
            sources |= {places[at]: (number, at) for at in range(first, len(places))}
        self._reserve(self.num_tokens)
        place = torch.tensor(list(sources), dtype=torch.int64)
        slot, at = torch.tensor(list(sources.values()), dtype=torch.int64).reshape(-1, 2).T
        self._kept.copy(slots, (slot, at), (torch.zeros_like(place), place))

    def _use(self, salt: Hashable, tokens: Sequence[int], places: Sequence[int]) -> None:
        """Note a use of the first tokens, which have these places."""
        for at in reversed(range(len(places))):
            self._places.move_to_end((places[at - 1] if at else (salt,), tokens[at]))

    def _free_place(self) -> int:
        if self.num_tokens < self._kept.max_tokens:
            return self.num_tokens
        return self._places.popitem(last=False)[1]

    def _reserve(self, tokens: int) -> None:
        if tokens > self.capacity:
            enough = max(tokens, 2 * self.capacity, _FIRST_TOKENS)
            self._kept.reserve(1, min(enough, self._kept.max_tokens), used=self._kept.size)


@dataclass(slots=True)
class PrefillSequence:
    """A sequence, the requests that have it in common, and the places of its first tokens in the prefix cache."""

    rows: list[CompletionRequest]
    salt: Hashable
    tokens: list[int]
    places: list[int]  # never of all tokens: the last one has to be computed for its logits
    slots: range = range(0)  # of the requests

    @property
    def num_new(self) -> int:
        return len(self.tokens) - len(self.places)


def distinct(rows: Iterable[CompletionRequest], cache: PrefixCache) -> list[PrefillSequence]:
    """The sequences of these requests."""
    shared: dict[Hashable, list[CompletionRequest]] = {}
    for row in rows:
        shared.setdefault((row.salt, row.may_reuse, tuple(row.sequence)), []).append(row)
    sequences = []
    for same in shared.values():
        salt, tokens = same[0].salt, same[0].sequence
        places = cache.find(salt, tokens[:-1]) if same[0].may_reuse else []
        sequences.append(PrefillSequence(same, salt, tokens, places))
    return sequences


def passes(fills: Sequence[PrefillSequence], first_slot: int) -> list[list[PrefillSequence]]:
    """Sequences with about as many new tokens share a pass; the requests get slots in this order."""
    groups: list[list[PrefillSequence]] = []
    real = longest = 0
    for fill in sorted(fills, key=lambda fill: (fill.num_new, len(fill.tokens))):
        padded = (len(groups[-1]) + 1) * fill.num_new if groups else 0
        longest = max(longest, len(fill.tokens))
        too_large = padded > _MAX_TOKENS or padded * longest > _MAX_TOKENS**2
        if not groups or too_large or padded - real - fill.num_new > max(_FREE_PADDING, _MAX_PADDING * padded):
            groups.append([])
            real, longest = 0, len(fill.tokens)
        groups[-1].append(fill)
        fill.slots = range(first_slot, first_slot + len(fill.rows))
        first_slot = fill.slots.stop
        real += fill.num_new
    return groups
