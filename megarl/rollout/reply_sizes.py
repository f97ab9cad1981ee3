"""How many bytes a server's reply may have, by what it was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.rollout.protocol import SamplingParams
from megarl.rollout.wire_columns import EngineColumn

ORDER_BYTES = 8 << 20  # what a server says of itself, or answers to an order
_LARGEST = 1 << 30  # of any reply
_BESIDE = 1 << 20  # in a reply, beside what was asked for
_TOKEN = 512  # its id, its log-probs and its text
_ENTRY = 64  # a log-prob and the id of its token
_DIGEST = 256  # of a tensor, with the name


def completion_bytes(num_asked: int, params: SamplingParams, columns: Sequence[EngineColumn] = ()) -> int:
    """A completion with its columns, of a request with `num_asked` tokens."""
    of_columns = sum(column.most_bytes for column in columns) * (num_asked + params.max_new_tokens)
    return min(_LARGEST, _BESIDE + _TOKEN * params.max_new_tokens + of_columns)


def score_bytes(count: int, top_k: int = 0) -> int:
    """The log-probs of `count` given tokens, each beside the `top_k` most likely ones."""
    return min(_LARGEST, _BESIDE + _ENTRY * count * (1 + top_k))


def digest_bytes(num_tensors: int, num_ranks: int = 1) -> int:
    """The digests of a model's tensors on each rank of a server.

    With attention data parallelism each group, of a rank or more, answers for all ranks.
    """
    return min(_LARGEST, _BESIDE + _DIGEST * num_tensors * num_ranks**2)
