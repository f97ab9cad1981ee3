"""The seconds that a group waited only for rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from megarl.rollout.collect import Scored
from megarl.rollout.collector.scoring_time import SPENT, ScoringTime, timed
from megarl.sample import Completion, Prompt


def test_it_is_from_the_last_begin_to_the_last_end_of_the_groups_own_calls() -> None:
    now, spent = [0.0], {}

    async def reward(prompt: Prompt, completions: list[Completion]) -> Sequence[Scored | str]:
        begun[prompt.uid].set()
        await ends[prompt.uid].wait()
        return ["no number"]

    async def group(name: str) -> None:
        spent[name] = ScoringTime()
        SPENT.set(spent[name])
        async with asyncio.TaskGroup() as tasks:  # as episodes are
            for call in ("first", "second"):
                tasks.create_task(score(Prompt(f"{name}/{call}", [1], ""), []))

    async def run() -> None:
        begun.update({uid: asyncio.Event() for uid in uids})
        ends.update({uid: asyncio.Event() for uid in uids})
        async with asyncio.TaskGroup() as tasks:
            for at, name in enumerate("ab"):
                now[0] = float(at)
                tasks.create_task(group(name))
                for call in ("first", "second"):
                    await begun[f"{name}/{call}"].wait()
            for uid, at in (("b/first", 3.0), ("a/first", 5.0), ("b/second", 7.0), ("a/second", 11.0)):
                now[0] = at
                ends[uid].set()
                await asyncio.sleep(0)
                await asyncio.sleep(0)

    uids = [f"{name}/{call}" for name in "ab" for call in ("first", "second")]
    begun: dict[str, asyncio.Event] = {}
    ends: dict[str, asyncio.Event] = {}
    score = timed(reward, clock=lambda: now[0])
    asyncio.run(run())
    assert {name: times.seconds for name, times in spent.items()} == {"a": 11.0, "b": 6.0}


def test_a_reward_that_raises_is_timed_and_a_group_without_a_call_waited_for_none() -> None:
    async def broken(prompt: Prompt, completions: list[Completion]) -> Sequence[Scored | str]:
        raise KeyError

    async def run() -> ScoringTime:
        spent = ScoringTime()
        SPENT.set(spent)
        assert spent.seconds == 0
        with pytest.raises(KeyError):
            await timed(broken, clock=iter([1.0, 4.0]).__next__)(Prompt("0-0", [1], ""), [])
        return spent

    assert asyncio.run(run()).seconds == 3
