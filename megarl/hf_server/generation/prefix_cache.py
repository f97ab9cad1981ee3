"""The prefix cache: KV of sequences that were prefilled or written, for later ones that begin with the same tokens.

A sequence is found by its salt and its tokens, one token after the other; sequences that begin alike share what they
have in common.  KV of one salt is never used for another.  Each token is kept at a place, which is a position in the
only slot of a `KVSlots`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

import torch

from megarl.hf_server.generation.kv_cache import KVSlots

_FIRST_TOKENS = 1 << 10  # the first allocation; each further one doubles it


Written = tuple[Hashable, int, int, Sequence[int]]  # salt, slot, start, tokens: see PrefixCache.store
_Key = tuple[int | tuple[Hashable], int]  # place of the token before it, or the salt; token


class PrefixCache:
    """As many tokens as its memory may hold; the one that was not used for the longest time makes room.

    Example: cache = PrefixCache(model.new_cache(1000))
             cache.store(running, [("3", 4, 0, [5, 6, 7])])  # slot 4 of `running` holds three tokens of salt "3"
             cache.load(running, [(cache.find("3", [5, 6, 9]), [1, 2])])  # two of them into slots 1 and 2
    """

    def __init__(self, kept: KVSlots) -> None:
        """`kept`: empty, and used by nobody else."""
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
