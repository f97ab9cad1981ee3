"""Sample generators: make the scored samples of one prompt, or a `LostRollout`.  Here: plain completions."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, Self

from transformers import PreTrainedTokenizerBase

from megarl.rollout.continuation import generate_completion
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.pool.pool_server import RolloutFailed
from megarl.rollout.protocol import MAX_SEED, SamplingParams
from megarl.samples.sample import Completion, LostRollout, Prompt, Sample


class Scored(Protocol):
    """The result of a reward for one completion: the reward to train with, numbers to log, the answer that it read."""

    @property
    def reward(self) -> float: ...

    @property
    def extra(self) -> dict[str, float]: ...

    @property
    def pred(self) -> str | None: ...


class NoSample(NamedTuple):
    """Why there is no sample; `is_lost`: the servers did not generate it, otherwise no reward could score it."""

    reason: str
    is_lost: bool = False


# For each completion its reward, or a sentence that says why it has none.
Score = Callable[[Prompt, list[Completion]], Awaitable[Sequence[Scored | str]]]


class SampleGenerator(Protocol):
    """Makes the samples of a run; entered before the first group and left after the last one."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def group(
        self, prompt: Prompt, n: int, params: SamplingParams, *, greedy: bool = False, urgent: bool = False
    ) -> list[Sample] | LostRollout:
        """n scored samples of one prompt; with `greedy` each has the reward of one more, greedy sample.

        `urgent`: see generate_completion.
        """
        ...

    def counters(self) -> dict[str, float]:
        """Totals since the start, by name."""
        ...

    @property
    def first_errors(self) -> Mapping[str, str]:
        """By kind, the first fault of what makes samples that ends no run."""
        ...


MakeGenerator = Callable[[EnginePool, PreTrainedTokenizerBase, Score], SampleGenerator]


class Completions:
    """The generator of plain completions.  `special_tokens`: the texts that rewards read have these, too."""

    def __init__(
        self, pool: EnginePool, tokenizer: PreTrainedTokenizerBase, score: Score, *, special_tokens: bool = False
    ) -> None:
        self._pool = pool
        self._tokenizer = tokenizer
        self._score = score
        self._special_tokens = special_tokens

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def group(
        self, prompt: Prompt, n: int, params: SamplingParams, *, greedy: bool = False, urgent: bool = False
    ) -> list[Sample] | LostRollout:
        """n scored completions, each with its own request; a LostRollout if one of them failed.

        A completion that the reward could not score leaves the group, because any number for it would teach something.
        If fewer than two are left, or the greedy one leaves, the group is a LostRollout: nothing is left to compare.

        With params.sampling_seed every completion has its own seed: see for_completion.  Exceptions of the reward are
        raised.
        """
        wanted = [for_completion(params, prompt.uid, index) for index in range(n)] + [params.as_greedy()] * greedy
        try:
            completions = await self._generate(prompt, wanted, urgent=urgent)
        except RolloutFailed as error:
            return LostRollout(prompt, str(error))
        results = await self._score(prompt, completions)
        assert len(results) == len(completions), (
            f"the reward gave {len(results)} results for {len(completions)} completions"
        )
        outcomes: list[Sample | NoSample] = []
        for completion, result in zip(completions, results, strict=True):
            if isinstance(result, str):
                self._pool.waste("unscored", len(completion.token_ids))
                outcomes.append(NoSample(result))
            else:
                outcomes.append(Sample.of(prompt, completion, float(result.reward), result.extra, pred=result.pred))
        return grouped(self._pool, prompt, outcomes, n)

    def counters(self) -> dict[str, float]:
        return {}

    @property
    def first_errors(self) -> Mapping[str, str]:
        return {}

    async def _generate(self, prompt: Prompt, wanted: Sequence[SamplingParams], *, urgent: bool) -> list[Completion]:
        """A completion with its text for each of `wanted`; if one fails, the others are cancelled."""
        pool = self._pool
        with pool.session(len(wanted)) as affinity:
            asks = (generate_completion(pool, prompt.token_ids, p, affinity=affinity, urgent=urgent) for p in wanted)
            tasks = [asyncio.create_task(ask) for ask in asks]
            try:
                completions = await asyncio.gather(*tasks)
            except (RolloutFailed, asyncio.CancelledError) as error:
                done = [task for task in tasks if task.done() and not task.cancelled() and not task.exception()]
                cause = "lost" if isinstance(error, RolloutFailed) else "cancelled"
                pool.waste(cause, sum(len(task.result().token_ids) for task in done))
                raise
            finally:
                for task in tasks:
                    task.cancel()
        return [replace(completion, text=self._text(completion)) for completion in completions]

    def _text(self, completion: Completion) -> str:
        return text_of(self._tokenizer, completion, special_tokens=self._special_tokens)


def text_of(tokenizer: PreTrainedTokenizerBase, completion: Completion, *, special_tokens: bool) -> str:
    """What a reward reads: the text without special tokens, or with all but the one that ended the completion."""
    ids = completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
    return str(tokenizer.decode(ids, skip_special_tokens=not special_tokens))


def grouped(
    pool: EnginePool, prompt: Prompt, outcomes: Sequence[Sample | NoSample], n: int
) -> list[Sample] | LostRollout:
    """The group of n samples, of which some may be missing.

    One more sample is a greedy one, whose reward the others get.  What is lost is counted as wasted, here only that of
    samples with a reward.
    """
    samples = [outcome for outcome in outcomes[:n] if isinstance(outcome, Sample)]
    missing = [outcome for outcome in outcomes if isinstance(outcome, NoSample)]
    base = outcomes[n] if len(outcomes) > n else None
    if len(samples) < min(2, n) or isinstance(base, NoSample):
        num_unscored = sum(not outcome.is_lost for outcome in missing)
        cause, what = ("unscored", "scored") if num_unscored else ("lost", "generated")
        pool.waste(cause, sum(outcome.num_learnt for outcome in outcomes if isinstance(outcome, Sample)))
        first = next(outcome.reason for outcome in missing if outcome.is_lost == (not num_unscored))
        number = num_unscored or len(missing)
        reason = f"{number} of {len(outcomes)} completions could not be {what}; the first: {first}"
        return LostRollout(prompt, reason, num_unscored)
    return samples if base is None else [replace(sample, greedy_reward=base.reward) for sample in samples]


def for_completion(params: SamplingParams, uid: str, index: int) -> SamplingParams:
    """The same parameters with a seed for completion `index` of the visit `uid` of a prompt.

    A visit that is asked again has the same seeds: they depend on nothing else.
    """
    if params.sampling_seed is None:
        return params
    digest = hashlib.sha256(f"{params.sampling_seed}:{uid}:{index}".encode()).digest()
    return replace(params, sampling_seed=int.from_bytes(digest[:4], "big") & MAX_SEED)
