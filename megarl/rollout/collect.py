"""Generates and scores the completions of one prompt. If generation fails, the result is a `LostRollout`."""

from __future__ import annotations

import hashlib
from asyncio import gather
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from megarl.rollout.pool import EnginePool, RolloutFailed
from megarl.rollout.protocol import MAX_SEED, SamplingParams
from megarl.sample import Completion, LostRollout, Prompt, Sample


class Scored(Protocol):
    """The result of a reward for one completion: the reward to train with, and further numbers to log."""

    @property
    def reward(self) -> float: ...

    @property
    def extra(self) -> dict[str, float]: ...


Score = Callable[[Prompt, list[Completion]], Awaitable[Sequence[Scored]]]


async def collect_group(
    pool: EnginePool,
    prompt: Prompt,
    n: int,
    params: SamplingParams,
    score: Score,
    *,
    decode: Callable[[list[int]], str],
    greedy: bool = False,
) -> list[Sample] | LostRollout:
    """n scored completions of one prompt; a LostRollout if the request failed or a completion was aborted.

    `decode` turns a completion's tokens into text without special tokens. With params.sampling_seed every prompt has
    its own seed, made of this one and the prompt's uid. With `greedy` one more, greedy completion is generated, and
    each sample has its reward. Exceptions of `score` are raised.
    """
    asked = [(n, for_prompt(params, prompt.uid))] + ([(1, params.as_greedy())] if greedy else [])
    try:
        answers = await gather(*(pool.generate(prompt.token_ids, count, how, rid=None) for count, how in asked))
    except RolloutFailed as error:
        return LostRollout(prompt, str(error))
    completions = [completion for answer in answers for completion in answer]
    aborted = sum(completion.finish_reason == "abort" for completion in completions)
    if aborted:
        return LostRollout(prompt, f"{aborted} of {len(completions)} completions were aborted by the server")
    completions = [replace(completion, text=decode(completion.token_ids)) for completion in completions]
    results = await score(prompt, completions)
    assert len(results) == len(completions), (
        f"the reward gave {len(results)} results for {len(completions)} completions"
    )
    greedy_reward = float(results[n].reward) if greedy else None
    return [
        Sample(prompt, completion, float(result.reward), dict(result.extra), greedy_reward)
        for completion, result in zip(completions[:n], results[:n], strict=True)
    ]


def for_prompt(params: SamplingParams, uid: str) -> SamplingParams:
    """The same parameters with a seed for this prompt: with one seed all prompts would get the same random numbers."""
    if params.sampling_seed is None:
        return params
    digest = hashlib.sha256(f"{params.sampling_seed}:{uid}".encode()).digest()
    return replace(params, sampling_seed=int.from_bytes(digest[:4], "big") & MAX_SEED)
