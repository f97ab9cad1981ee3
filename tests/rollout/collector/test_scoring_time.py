"""The seconds that a group waited only for rewards."""

import asyncio
from collections.abc import Sequence

import pytest

from megarl.rollout.collect import Scored
from megarl.rollout.collector.collector import SPENT, ScoringTime, timed
from megarl.samples.sample import Completion, Prompt


async def test_it_is_from_the_last_begin_to_the_last_end_of_the_groups_own_calls() -> None:
    uids = [f"{name}/{call}" for name in "ab" for call in ("first", "second")]
    begun, ends = ({uid: asyncio.Event() for uid in uids} for _ in range(2))
    now, spent = [0.0], dict[str, ScoringTime]()

    async def reward(prompt: Prompt, completions: list[Completion]) -> Sequence[Scored | str]:
        begun[prompt.uid].set()
        await ends[prompt.uid].wait()
        return ["no number"]

    score = timed(reward, clock=lambda: now[0])

    async def group(name: str) -> None:
        spent[name] = ScoringTime()
        SPENT.set(spent[name])
        async with asyncio.TaskGroup() as tasks:  # as episodes are
            for call in ("first", "second"):
                tasks.create_task(score(Prompt(f"{name}/{call}", [1], ""), []))

    async with asyncio.TaskGroup() as tasks:
        for at, name in enumerate("ab"):
            now[0] = float(at)
            tasks.create_task(group(name))
            for call in ("first", "second"):
                await begun[f"{name}/{call}"].wait()
        for uid, at_s in (("b/first", 3.0), ("a/first", 5.0), ("b/second", 7.0), ("a/second", 11.0)):
            now[0] = at_s
            ends[uid].set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    assert {name: times.seconds for name, times in spent.items()} == {"a": 11.0, "b": 6.0}


async def test_a_reward_that_raises_is_timed_and_a_group_without_a_call_waited_for_none() -> None:
    async def broken(prompt: Prompt, completions: list[Completion]) -> Sequence[Scored | str]:
        raise KeyError

    spent = ScoringTime()
    SPENT.set(spent)
    assert spent.seconds == 0
    with pytest.raises(KeyError):
        await timed(broken, clock=iter([1.0, 4.0]).__next__)(Prompt("0-0", [1], ""), [])
    assert spent.seconds == 3
