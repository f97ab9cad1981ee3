"""One completion, generated in pieces: what is generated and verified stays, whatever happens to its server.

A piece ends after the pool's `piece_tokens`, after the time limit of a request, or when its server ends it (a push that
aborts, a time slice that is over).  The next one continues it, on the same server if possible.  Both engines draw token
t from (seed, t), so a completion is the same in pieces of any size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.pool.pool_server import Affinity, PieceRequest, RolloutFailed
from megarl.rollout.pool.slots import Waiting
from megarl.rollout.protocol import SamplingParams
from megarl.samples.sample import Completion, VersionSpan

_EMPTY = Completion([], [], "abort", ())


async def generate_completion(
    pool: EnginePool,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    prefer: str | None = None,
    affinity: Affinity | None = None,
    urgent: bool = False,
    waiting: Waiting | None = None,
    num_known: int = 0,
) -> Completion:
    """One completion of up to params.max_new_tokens, without text; its finish_reason is "stop" or "length".

    `affinity`: of its session.  `prefer`: url of the server for the first piece, if not that of the session; each
    further piece prefers the server of the piece before.  `urgent`: it takes a slot before those that are not.
    `waiting`: measures the time without a slot or a server.  `num_known`: of so many tokens of the prompt the caller
    has the columns already; those of the completion may be zeros there.
    Raises RolloutFailed if a request is refused, or if so many attempts in a row brought no token as the pool allows.
    """
    pool.check_prompt(prompt_ids)
    waiting = waiting or Waiting()
    if prefer is None and affinity is not None:
        prefer = affinity.url
    with waiting:
        await pool.slots.take(urgent=urgent)
    completion, is_whole = _EMPTY, False
    try:
        while not is_whole:
            left = params.max_new_tokens - len(completion.token_ids)
            most = min(left, pool.settings.piece_tokens or left)
            part = params if most == params.max_new_tokens else replace(params, max_new_tokens=most)
            tokens = [*prompt_ids, *completion.token_ids]
            known = len(tokens) if completion.token_ids else num_known
            began = completion.versions[0].version if completion.versions else None
            request = PieceRequest(tokens, part, known, began, affinity)
            piece, prefer = await pool.generate(request, prefer=prefer, waiting=waiting)
            completion = join(completion, piece, len(prompt_ids))
            is_whole = len(piece.token_ids) == left or _is_last(piece, part)
    except RolloutFailed as error:
        pool.waste("lost", len(completion.token_ids))
        after = f" after {len(completion.token_ids)} tokens" if completion.token_ids else ""
        raise RolloutFailed(f"{error}{after}") from error
    except asyncio.CancelledError:
        pool.waste("cancelled", len(completion.token_ids))
        raise
    finally:
        pool.slots.give_back()
    return replace(completion, finish_reason="length") if completion.finish_reason == "abort" else completion


def _is_last(piece: Completion, asked: SamplingParams) -> bool:
    """Whether the model ended the completion, or its server has no room for more: its context or KV cache is full."""
    is_full = piece.finish_reason == "length" and len(piece.token_ids) < asked.max_new_tokens
    return is_full or piece.finish_reason == "stop"


def join(before: Completion, piece: Completion, prompt_tokens: int) -> Completion:
    """`before` continued by `piece`, whose prompt was the prompt and all tokens of `before`.

    Both have the same columns; of the piece's only the entries of its new tokens count.
    """
    if not before.token_ids:
        return piece
    length = prompt_tokens + len(before.token_ids)
    return Completion(
        before.token_ids + piece.token_ids,
        before.log_probs + piece.log_probs,
        piece.finish_reason,
        _joined_spans(before, piece),
        columns={n: np.concatenate([column, piece.columns[n][length:]]) for n, column in before.columns.items()},
    )


def _joined_spans(before: Completion, piece: Completion) -> tuple[VersionSpan, ...]:
    shift = len(before.token_ids)
    *earlier, last = before.versions
    first, *after = (VersionSpan(span.version, span.start + shift, span.end + shift) for span in piece.versions)
    middle = [VersionSpan(last.version, last.start, first.end)] if last.version == first.version else [last, first]
    return (*earlier, *middle, *after)
