"""Servers join a run by the run's token, and leave it: both sides of the connection."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from megarl import __version__
from megarl.machines import joining
from megarl.machines.joining import JoinedProgram, JoinFailed, JoinListener, Membership
from megarl.processes.channels import waiting
from megarl.processes.channels.connection import connect
from megarl.processes.channels.waiting import Wait

TOKEN = "the secret of these tests"


@contextmanager
def door() -> Iterator[JoinListener]:
    with JoinListener("127.0.0.1:0", TOKEN) as found:
        yield found


def member_of(found: JoinListener) -> Membership:
    return Membership(f"127.0.0.1:{found.port}", TOKEN, Wait(20, print))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.01)


def only_party(found: JoinListener) -> JoinedProgram:
    until(lambda: len(found.programs) == 1 and found.programs[0].urls)
    return found.programs[0]


def test_servers_are_named_and_leave_when_the_driver_lets_them_go_or_are_told_why_it_has_no_use() -> None:
    with door() as found, closing(member_of(found)) as membership:
        assert membership.own_address == "127.0.0.1"
        membership.name(["http://127.0.0.1:1", "http://127.0.0.1:2"])
        program = only_party(found)
        assert program.urls == ("http://127.0.0.1:1", "http://127.0.0.1:2") and not program.wants_to_leave
        left: list[bool] = []
        leaving = threading.Thread(target=lambda: left.append(membership.leave(60)))
        leaving.start()
        until(lambda: program.wants_to_leave)
        assert not membership.has_ended, "the run has it still"
        program.dismiss()
        leaving.join(60)
        assert left == [True] and membership.has_ended
        found.forget(program)

        refused = member_of(found)
        refused.name(["http://127.0.0.1:1"])
        only_party(found).dismiss("the run does not take http://127.0.0.1:1: it is too old")
        with pytest.raises(JoinFailed, match="it is too old"):
            until(lambda: refused.has_ended)


def test_at_the_end_of_a_run_its_servers_end_too_with_its_error_if_it_failed() -> None:
    with door() as found:
        membership = member_of(found)
        until(lambda: found.programs)
    until(lambda: membership.has_ended)
    with pytest.raises(ValueError, match="full"), door() as found:
        membership = member_of(found)
        until(lambda: found.programs)
        raise ValueError("the disk is\nfull")
    with pytest.raises(JoinFailed, match="^the run stopped: the disk is full$"):
        until(lambda: membership.has_ended)


def test_strangers_and_other_versions_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with door() as found:
        with pytest.raises(JoinFailed, match="another token"):
            Membership(f"127.0.0.1:{found.port}", "not the secret of these", Wait(20, print))
        monkeypatch.setattr(joining, "__version__", "0.0.1")
        connection = connect(f"127.0.0.1:{found.port}", TOKEN, {"version": "0.0.2"}, timeout_s=20)
        assert connection.receive()[0] == {
            "do": "leave",
            "why": "it has megarl 0.0.2, the run 0.0.1; expected the same",
        }
        assert found.programs == []


def test_an_owner_that_is_gone_and_a_driver_that_is_gone_are_noticed() -> None:
    with door() as found:
        membership = member_of(found)
        membership.name(["http://127.0.0.1:1"])
        program = only_party(found)
        membership.close()
        until(lambda: program.lost)
        assert not program.wants_to_leave
        found.forget(program)

        membership = member_of(found)
        until(lambda: found.programs)
        found.programs[0].connection.close()  # as when the driver is killed
        with pytest.raises(JoinFailed, match="^the driver at 127.0.0.1:[0-9]+ is lost: "):
            until(lambda: membership.has_ended)


@pytest.mark.parametrize("urls", [5, None, "http://127.0.0.1:1", {"a": 1}, ["http://127.0.0.1:1", 2]])
def test_a_party_that_says_nonsense_is_lost(urls: object) -> None:
    """Nobody would hear any more of it that it leaves, or that it is gone."""
    with door() as found:
        connection = connect(f"127.0.0.1:{found.port}", TOKEN, {"version": __version__}, timeout_s=60)
        connection.send({"urls": urls})
        until(lambda: found.programs and found.programs[0].lost)
        assert found.programs[0].urls == ()
        assert found.programs[0].lost == f"it names {urls} as its servers; expected a list of urls"
        connection.close()


def test_silence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "SILENCE_S", 0.3)
    monkeypatch.setattr(waiting, "HEARTBEAT_S", 60.0)
    with door() as found:
        membership = member_of(found)
        until(lambda: found.programs)
        program = found.programs[0]
        until(lambda: program.lost)
        with pytest.raises(JoinFailed, match="is lost"):
            until(lambda: membership.has_ended)


def test_a_driver_that_is_not_there_and_an_address_that_is_not_here_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"rollout.join=127.0.0.1:{port}: .* expected an address of the machine"):
            JoinListener(f"127.0.0.1:{port}", TOKEN).__enter__()
    with pytest.raises(JoinFailed, match=rf"=127.0.0.1:{port}: no driver is there yet \(Connection refused"):
        Membership(f"127.0.0.1:{port}", TOKEN, Wait(0.0, print))
