"""What a prefill has to compute: the distinct sequences of admitted requests, and which of them share a pass."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from megarl.hf_server.generation.prefix_cache import PrefixCache
from megarl.hf_server.generation.running_batch import Request

_MAX_TOKENS = 8192  # padded new tokens of a pass, and its attention's scores a head their square: bounds the memory
_FREE_PADDING, _MAX_PADDING = 64, 0.25  # sequences share a pass while padding is at most this many tokens or this share


@dataclass(slots=True)
class Fill:
    """A sequence, the requests that have it in common, and the places of its first tokens in the prefix cache."""

    rows: list[Request]
    salt: Hashable
    tokens: list[int]
    places: list[int]  # never of all tokens: the last one has to be computed for its logits
    slots: range = range(0)  # of the requests

    @property
    def num_new(self) -> int:
        return len(self.tokens) - len(self.places)


def distinct(rows: Iterable[Request], cache: PrefixCache) -> list[Fill]:
    """The sequences of these requests."""
    shared: dict[Hashable, list[Request]] = {}
    for row in rows:
        shared.setdefault((row.salt, row.may_reuse, tuple(row.sequence)), []).append(row)
    found = []
    for same in shared.values():
        salt, tokens = same[0].salt, same[0].sequence
        places = cache.find(salt, tokens[:-1]) if same[0].may_reuse else []
        found.append(Fill(same, salt, tokens, places))
    return found


def passes(fills: Sequence[Fill], first_slot: int) -> list[list[Fill]]:
    """Sequences with about as many new tokens share a pass; the requests get slots in this order."""
    groups: list[list[Fill]] = []
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
