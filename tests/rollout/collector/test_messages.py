"""The outbox of a collector: it gathers messages, and sends them at once when it is told that no more come."""

import multiprocessing

import pytest

from megarl.rollout.collector.messages import Outbox

PATIENCE_S = 60.0  # far longer than a test takes: who waits for it fails


def fail(error: Exception) -> None:
    raise AssertionError(error)


@pytest.mark.parametrize("early", [False, True], ids=["after the messages", "before them"])
def test_messages_wait_for_more_and_are_sent_at_once_when_no_more_come(*, early: bool) -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    outbox = Outbox(sender, fail, gather_s=10 * PATIENCE_S)

    def received() -> list[str]:
        assert receiver.poll(PATIENCE_S)
        return list(receiver.recv())

    if early:
        outbox.hurry()
    outbox.put("a")
    if not early:
        assert not receiver.poll(0.05)
        outbox.put("b")
        outbox.hurry()
    assert received() == (["a"] if early else ["a", "b"])
    outbox.put("c")
    outbox.close()
    assert received() == ["c"]
    outbox.join()
