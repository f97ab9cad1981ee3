"""Generates and scores the completions of one prompt. If either fails, the result is a `LostRollout`."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from megarl.rollout.pieces import write
from megarl.rollout.pool import EnginePool, RolloutFailed
from megarl.rollout.protocol import MAX_SEED, SamplingParams
from megarl.sample import Completion, LostRollout, Prompt, Sample


class Scored(Protocol):
    """The result of a reward for one completion: the reward to train with, and further numbers to log."""

    @property
    def reward(self) -> float: ...

    @property
    def extra(self) -> dict[str, float]: ...


# For each completion its reward, or a sentence that says why it has none.
Score = Callable[[Prompt, list[Completion]], Awaitable[Sequence[Scored | str]]]


async def collect_group(
    pool: EnginePool,
    prompt: Prompt,
    n: int,
    params: SamplingParams,
    score: Score,
    *,
    decode: Callable[[list[int]], str],
    piece_tokens: int = 0,
    greedy: bool = False,
    urgent: bool = False,
) -> list[Sample] | LostRollout:
    """n scored completions of one prompt, each with its own request; a LostRollout if one of them failed.

    A completion that the reward could not score leaves the group, because any number for it would teach something.  If
    fewer than two are left, or the greedy one leaves, the group is a LostRollout: nothing is left to compare.

    `decode` turns a completion's tokens into text without special tokens. With params.sampling_seed every completion
    has its own seed: see for_completion. `piece_tokens`, `urgent`: see pieces.write. With `greedy` one more, greedy
    completion is generated, and each sample has its reward. Exceptions of `score` are raised.
    """
    asked = [for_completion(params, prompt.uid, index) for index in range(n)] + [params.as_greedy()] * greedy
    try:
        completions = await _write_all(pool, prompt.token_ids, asked, piece_tokens, urgent=urgent)
    except RolloutFailed as error:
        return LostRollout(prompt, str(error))
    completions = [replace(completion, text=decode(completion.token_ids)) for completion in completions]
    results = await score(prompt, completions)
    assert len(results) == len(completions), (
        f"the reward gave {len(results)} results for {len(completions)} completions"
    )
    unscored = [(c, r) for c, r in zip(completions, results, strict=True) if isinstance(r, str)]
    scored = [(c, r) for c, r in zip(completions[:n], results[:n], strict=True) if not isinstance(r, str)]
    base = results[n] if greedy else None
    if len(scored) < min(2, n) or isinstance(base, str):
        pool.waste("unscored", _num_tokens(completions))
        reason = f"{len(unscored)} of {len(results)} completions could not be scored; the first: {unscored[0][1]}"
        return LostRollout(prompt, reason, len(unscored))
    pool.waste("unscored", _num_tokens([completion for completion, _ in unscored]))
    greedy_reward = None if base is None else float(base.reward)
    return [
        Sample.of(prompt, completion, float(result.reward), result.extra, greedy_reward)
        for completion, result in scored
    ]


async def _write_all(
    pool: EnginePool, prompt_ids: Sequence[int], asked: Sequence[SamplingParams], piece_tokens: int, *, urgent: bool
) -> list[Completion]:
    """One completion for each of `asked`; if one fails, the others are cancelled."""
    with pool.session(len(asked)) as home:
        tasks = [
            asyncio.create_task(write(pool, prompt_ids, params, piece_tokens=piece_tokens, prefer=home, urgent=urgent))
            for params in asked
        ]
        try:
            return await asyncio.gather(*tasks)
        except (RolloutFailed, asyncio.CancelledError) as error:
            done = [task.result() for task in tasks if task.done() and not task.cancelled() and not task.exception()]
            cause = "lost" if isinstance(error, RolloutFailed) else "cancelled"
            pool.waste(cause, _num_tokens(done))
            raise
        finally:
            for task in tasks:
                task.cancel()


def for_completion(params: SamplingParams, uid: str, index: int) -> SamplingParams:
    """The same parameters with a seed for completion `index` of the visit `uid` of a prompt.

    A visit that is asked again has the same seeds: they depend on nothing else.
    """
    if params.sampling_seed is None:
        return params
    digest = hashlib.sha256(f"{params.sampling_seed}:{uid}:{index}".encode()).digest()
    return replace(params, sampling_seed=int.from_bytes(digest[:4], "big") & MAX_SEED)


def _num_tokens(completions: Sequence[Completion]) -> int:
    return sum(len(completion.token_ids) for completion in completions)
