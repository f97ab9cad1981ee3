"""One completion, written in pieces: what is written and verified stays, whatever happens to its server.

A piece ends after `piece_tokens`, after the time limit of a request, or when its server ends it (a push that aborts, a
time slice that is over).  The next piece goes on from there, on the same server if possible, otherwise on another one.
A piece of fewer tokens than asked, with finish_reason "length", is the last one: the server has no room for more.
Both engines draw token t from (seed, t), so a completion is the same in pieces of any size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.rollout.pool.meter import Waiting
from megarl.rollout.pool.pool import Affinity, EnginePool, RolloutFailed
from megarl.rollout.protocol import SamplingParams
from megarl.sample import Completion, VersionSpan

_EMPTY = Completion([], [], "abort", ())


async def write(
    pool: EnginePool,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    piece_tokens: int = 0,
    prefer: str | None = None,
    affinity: Affinity | None = None,
    urgent: bool = False,
    waiting: Waiting | None = None,
    num_known: int = 0,
) -> Completion:
    """One completion of up to params.max_new_tokens, without text; its finish_reason is "stop" or "length".

    `piece_tokens`: new tokens of one request at most; 0: no limit.  `prefer`: url of the server for the first piece;
    each further one prefers the server of the piece before.  `affinity`: of its session.  `urgent`: it takes a slot
    before those that are not.
    `waiting`: measures the time without a slot or a server.  `num_known`: of so many tokens of the prompt the caller
    has the columns already; those of the completion may be zeros there.
    Raises RolloutFailed if a request is refused, or if so many attempts in a row brought no token as the pool allows.
    """
    pool.check_prompt(prompt_ids)
    waiting = waiting or Waiting()
    with waiting:
        await pool.slots.take(urgent=urgent)
    written, is_whole = _EMPTY, False
    try:
        while not is_whole:
            left = params.max_new_tokens - len(written.token_ids)
            most = min(left, piece_tokens or left)
            part = params if most == params.max_new_tokens else replace(params, max_new_tokens=most)
            tokens = [*prompt_ids, *written.token_ids]
            known = len(tokens) if written.token_ids else num_known
            began = written.versions[0].version if written.versions else None
            how: dict[str, Any] = {"affinity": affinity, "num_known": known, "began": began}
            piece, prefer = await pool.generate(tokens, part, prefer=prefer, waiting=waiting, **how)
            written = join(written, piece, len(prompt_ids))
            is_whole = len(piece.token_ids) == left or _is_last(piece, part)
    except RolloutFailed as error:
        pool.waste("lost", len(written.token_ids))
        after = f" after {len(written.token_ids)} tokens" if written.token_ids else ""
        raise RolloutFailed(f"{error}{after}") from error
    except asyncio.CancelledError:
        pool.waste("cancelled", len(written.token_ids))
        raise
    finally:
        pool.slots.give_back()
    return replace(written, finish_reason="length") if written.finish_reason == "abort" else written


def _is_last(piece: Completion, asked: SamplingParams) -> bool:
    """Whether the model ended the completion, or its server has no room for more: its context or KV cache is full."""
    is_full = piece.finish_reason == "length" and len(piece.token_ids) < asked.max_new_tokens
    return is_full or piece.finish_reason == "stop"


def join(written: Completion, piece: Completion, prompt_tokens: int) -> Completion:
    """A completion that goes on with `piece`, whose prompt was the prompt and all tokens of `written`.

    Of the piece's columns only the entries of its new tokens count.  Raises RolloutFailed if it has other columns.
    """
    if not written.token_ids:
        return piece
    length = prompt_tokens + len(written.token_ids)
    return Completion(
        written.token_ids + piece.token_ids,
        written.log_probs + piece.log_probs,
        piece.finish_reason,
        _joined_spans(written, piece),
        columns=_joined_columns(written, piece, length),
    )


def _joined_spans(written: Completion, piece: Completion) -> tuple[VersionSpan, ...]:
    shift = len(written.token_ids)
    *before, last = written.versions
    first, *after = (VersionSpan(span.version, span.start + shift, span.end + shift) for span in piece.versions)
    middle = [VersionSpan(last.version, last.start, first.end)] if last.version == first.version else [last, first]
    return (*before, *middle, *after)


def _joined_columns(written: Completion, piece: Completion, length: int) -> dict[str, np.ndarray]:
    """`length`: tokens of the prompt and of `written`."""
    old, new = ({n: (c.dtype, c.shape[1:]) for n, c in each.columns.items()} for each in (written, piece))
    if old != new:
        raise RolloutFailed(f"a completion's columns are {old} in one piece and {new} in the next one")
    return {name: np.concatenate([column, piece.columns[name][length:]]) for name, column in written.columns.items()}
