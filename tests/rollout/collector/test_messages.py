"""The outbox of a collector: it gathers messages, and sends them at once when it is told that no more come."""

from __future__ import annotations

import multiprocessing

import pytest

from megarl.rollout.collector.messages import Outbox

PATIENCE_S = 60.0  # far longer than a test takes: who waits for it fails


def fail(error: Exception) -> None:
    raise AssertionError(error)


@pytest.mark.parametrize("early", [False, True], ids=["after the message", "before it"])
def test_messages_are_sent_at_once_when_no_more_come(*, early: bool) -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    outbox = Outbox(sender, fail, gather_s=10 * PATIENCE_S)
    if early:
        outbox.hurry()
    outbox.put("a")
    if not early:
        outbox.put("b")
        outbox.hurry()
    assert receiver.poll(PATIENCE_S)
    assert receiver.recv() == ["a", "b"][: 1 if early else 2]
    outbox.put("c")
    outbox.close()
    assert receiver.poll(PATIENCE_S)
    assert receiver.recv() == ["c"]
    outbox.join()


def test_otherwise_it_waits_for_more() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    outbox = Outbox(sender, fail, gather_s=10 * PATIENCE_S)
    outbox.put("a")
    assert not receiver.poll(0.05)
    outbox.put("b")
    outbox.hurry()
    assert receiver.poll(PATIENCE_S)
    assert receiver.recv() == ["a", "b"]
    outbox.close()
    outbox.join()
