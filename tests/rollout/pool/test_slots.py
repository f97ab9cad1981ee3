"""A limit on what runs at a time; who is urgent comes first."""

import asyncio
import random

import pytest

from megarl.rollout.pool.slots import Slots


async def test_urgent_ones_come_first_and_otherwise_who_came_first() -> None:
    slots, order = Slots(1), list[str]()

    async def one(name: str, *, urgent: bool) -> None:
        await slots.take(urgent=urgent)
        order.append(name)
        await asyncio.sleep(0)
        slots.give_back()

    await slots.take()
    names = {"a": False, "b": False, "c": True, "d": False, "e": True}
    tasks = [asyncio.create_task(one(name, urgent=urgent)) for name, urgent in names.items()]
    await asyncio.sleep(0)
    slots.give_back()
    await asyncio.gather(*tasks)
    assert "".join(order) == "ceabd"


async def test_it_is_known_whether_somebody_waits() -> None:
    slots = Slots(1)
    await slots.take()
    assert not slots.are_awaited
    waiter = asyncio.create_task(slots.take())
    await asyncio.sleep(0)
    assert slots.are_awaited
    waiter.cancel()
    await asyncio.wait([waiter])
    assert not slots.are_awaited, "it is not waited for any more, although it is still in the queue"


@pytest.mark.parametrize("seed", range(20))
async def test_no_more_run_than_there_are_slots_and_none_is_lost_to_a_cancellation(seed: int) -> None:
    rng, running, most, slots = random.Random(seed), set[int](), 0, Slots(3)

    async def one(number: int) -> None:
        nonlocal most
        await slots.take(urgent=rng.random() < 0.3)
        try:
            running.add(number)
            most = max(most, len(running))
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
        finally:
            running.discard(number)
            slots.give_back()

    tasks = [asyncio.create_task(one(number)) for number in range(60)]
    while not all(task.done() for task in tasks):
        for task in rng.sample(tasks, 4):
            if rng.random() < 0.3:
                task.cancel()
        await asyncio.sleep(0)
    assert most == 3 and not running
    for _ in range(3):  # all are free again
        await asyncio.wait_for(slots.take(), 10)


async def test_slots_grow_at_once_and_shrink_as_they_come_back():
    slots = Slots(1)
    await slots.take()
    waiting = [asyncio.create_task(slots.take()) for _ in range(3)]
    await asyncio.sleep(0)
    slots.grow(2)
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, True, False]
    slots.shrink(2)
    for _ in range(2):
        slots.give_back()
        await asyncio.sleep(0)
        assert not waiting[2].done(), "two of three are not handed on"
    slots.give_back()
    await waiting[2]
