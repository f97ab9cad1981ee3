"""Signals to a run, sent to this very process: what they ask for, and when they end it."""

import os
import signal
import threading
import time

import pytest

from megarl.processes.signals import NO_STEP, Signals, Terminated, pass_on


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def wait_for_the_end() -> None:
    while True:
        time.sleep(0.01)  # the timer of the signals ends this


def test_a_save_is_asked_for_once_a_signal() -> None:
    with Signals(60.0) as signals:
        assert not signals.take_save()
        send(signal.SIGUSR1)
        send(signal.SIGUSR1)
        assert signals.take_save()
        assert not signals.take_save()
        assert not signals.ends


def test_sigterm_ends_at_once_what_cannot_be_saved_yet() -> None:
    with pytest.raises(Terminated, match=NO_STEP), Signals(60.0):
        send(signal.SIGTERM)


def test_sigterm_waits_for_the_loop_however_often_it_comes() -> None:
    with pytest.raises(Terminated, match="SIGTERM: step 3 is saved"), Signals(60.0) as signals:
        signals.is_patient = True
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert signals.ends
        signals.end("step 3 is saved")


def test_a_loop_that_does_not_come_to_its_end_is_ended() -> None:
    late = r"within trainer.term_grace_s=0.05 s; the last save stays"
    with pytest.raises(Terminated, match=late), Signals(0.05) as signals:
        signals.is_patient = True
        send(signal.SIGTERM)
        wait_for_the_end()


def test_an_error_after_sigterm_is_its_consequence() -> None:
    with pytest.raises(Terminated, match="could not finish its step: rank 1 died"), Signals(60.0) as signals:
        signals.is_patient = True
        send(signal.SIGTERM)
        raise RuntimeError("rank 1 died")
    with pytest.raises(RuntimeError, match="rank 1 died"), Signals(60.0):
        raise RuntimeError("rank 1 died")


def test_handlers_and_timer_are_gone_afterwards() -> None:
    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    with Signals(60.0) as signals:
        signals.is_patient = True
        send(signal.SIGTERM)
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_signal_of_another_machine_counts_as_one_of_this_one() -> None:
    with Signals(60.0) as signals:
        thread = threading.Thread(target=pass_on, args=(int(signal.SIGUSR1),))
        thread.start()
        thread.join()
        assert signals.take_save()
        with pytest.raises(AssertionError, match="expected one of"):
            pass_on(signal.SIGKILL)
