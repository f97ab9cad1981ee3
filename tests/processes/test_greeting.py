"""Who is let in: a peer that proves it knows the token, and nobody else."""

import json
import queue
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from megarl.processes import listener as doors
from megarl.processes.connection import ConnectionLost, WireRefused, read_exactly
from megarl.processes.greeting import connect, greet
from megarl.processes.listener import Listener

Door = tuple[str, Callable[[], Future[Any]]]


@pytest.fixture
def door() -> Iterator[Door]:
    """An address where somebody knows "secret", and how he greets the next caller there."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as threads:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        yield address, lambda: threads.submit(lambda: greet(listener.accept()[0], "secret"))


def test_who_knows_the_token_is_let_in_and_who_does_not_is_told_so(door: Door) -> None:
    address, greets = door
    answer = greets()
    friend = connect(address, "secret", {"rank": 3}, timeout_s=5)
    connection, hello = answer.result()
    assert hello == {"rank": 3}, "nothing of the greeting is passed on"
    friend.send({"hello": 1})
    assert connection.receive()[0] == {"hello": 1}
    friend.close()
    answer = greets()
    with pytest.raises(WireRefused, match="has another token"):
        connect(address, "guess", {"rank": 3}, timeout_s=5)
    assert answer.result() is None


def word(data: bytes) -> bytes:
    return len(data).to_bytes(4) + data


def heard_word(sock: socket.socket) -> dict[str, Any]:
    return dict(json.loads(read_exactly(sock, int.from_bytes(read_exactly(sock, 4)))))


def test_the_token_itself_never_crosses_the_wire() -> None:
    """A listener that is not ours learns nothing by which it could call others, and is not believed."""
    heard = []

    def thief(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(word(b'{"question": "' + b"0" * 32 + b'"}'))
            heard.append(heard_word(sock))
            sock.sendall(word(json.dumps({"proof": heard[0]["proof"]}).encode()))

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        done = threads.submit(thief, listener)
        with pytest.raises(WireRefused):
            connect(f"127.0.0.1:{listener.getsockname()[1]}", "secret", {"rank": 3}, timeout_s=5)
        done.result()
    assert "secret" not in json.dumps(heard)


class Between:
    """Somebody between two friends, who passes on their greeting and then decides on each byte."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.target = (host, int(port))

    def pass_greeting(self) -> tuple[socket.socket, socket.socket]:
        """The sockets to the caller and to the host, after the host's proof was passed on."""
        caller, _ = self._listener.accept()
        host = socket.create_connection(self.target)
        for source, target in ((host, caller), (caller, host), (host, caller)):
            size = read_exactly(source, 4)
            target.sendall(size + read_exactly(source, int.from_bytes(size)))
        self._listener.close()
        return caller, host


def test_nobody_who_passes_on_a_greeting_can_say_who_the_caller_is(door: Door) -> None:
    """With the proof of another he still cannot seal a hello."""
    address, greets = door
    answer, between = greets(), Between(address)
    with ThreadPoolExecutor(1) as threads:
        friend = threads.submit(connect, between.address, "secret", {"node": 1}, timeout_s=20)
        caller, host = between.pass_greeting()
        with caller, host:
            host.sendall(b'\x00\x00\x00\x0b\x00\x00\x00\x00\x00\x00\x00\x00{"node": 2}' + b" " * 16)
            assert answer.result() is None
        friend.result().close()


def test_a_greeting_that_was_recorded_lets_nobody_in(door: Door) -> None:
    """The challenges are new for each caller."""
    address, greets = door
    answer, between = greets(), Between(address)
    with ThreadPoolExecutor(1) as threads:
        friend = threads.submit(connect, between.address, "secret", {"node": 1}, timeout_s=20)
        caller, host = between.pass_greeting()
        recorded = caller.recv(4096)
        host.sendall(recorded)
        connection, hello = answer.result()
        assert hello == {"node": 1}
        for end in (caller, host, connection, friend.result()):
            end.close()
    again = greets()
    with socket.create_connection(between.target) as thief:
        heard_word(thief)
        thief.sendall(word(json.dumps({"question": "0" * 32, "proof": "0" * 64}).encode()) + recorded)
        assert again.result() is None


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(word(b"[]"), id="a list"),
        pytest.param(word(b"17"), id="a number"),
        pytest.param(word('{"question": "1", "proof": "größe"}'.encode()), id="a proof beyond ASCII"),
        pytest.param(word(b'{"question": "\\ud800", "proof": "\\ud800"}'), id="half a character"),
        pytest.param(word(b'{"question": {}, "proof": []}'), id="no strings"),
        pytest.param(word(b"[" * 4000), id="deep"),
        pytest.param(word(b"\xff\xfe\x00"), id="no text"),
        pytest.param(word(b""), id="nothing"),
        pytest.param((2**31).to_bytes(4), id="a word that fills the memory"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: megarl\r\n\r\n", id="another protocol"),
    ],
)
def test_whatever_a_stranger_says_it_is_not_let_in(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(said)
        assert greet(ours, "secret", limit_s=5) is None
    assert ours.fileno() == -1, "closed"


def test_a_stranger_who_speaks_slowly_has_no_longer_than_others() -> None:
    """A byte now and then does not begin the time anew."""
    ours, theirs = socket.socketpair()
    spoken = 0
    with ThreadPoolExecutor(1) as threads, theirs:
        answer = threads.submit(greet, ours, "secret", 0.3)
        with suppress(OSError):
            for byte in word(b" " * 1000 + b"{}"):
                theirs.sendall(bytes([byte]))
                spoken += 1
                if answer.done():
                    break
                wait([answer], timeout=0.05)
        assert answer.result() is None
    assert spoken < 100


def test_more_silent_strangers_than_there_are_places_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be waited for an hour; a friend takes the place of one of them at once."""
    monkeypatch.setattr(doors, "MAX_CALLERS", 8)
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    arrived: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    door = Listener(listener, "secret", lambda connection, hello: arrived.put(hello), greeting_s=3600)
    with ExitStack() as strangers:
        for _ in range(30):
            strangers.enter_context(socket.create_connection((host, port)))
        friend = connect(f"{host}:{port}", "secret", {"rank": 3}, timeout_s=60)
        assert arrived.get(timeout=60) == {"rank": 3}
        friend.close()
    door.close()
    with pytest.raises(OSError):
        socket.create_connection((host, port), timeout=5)


def test_strangers_at_one_address_take_the_places_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow friend at another address keeps his."""
    monkeypatch.setattr(doors, "MAX_CALLERS", 4)
    listener = socket.create_server(("127.0.0.1", 0))
    place = listener.getsockname()
    door = Listener(listener, "secret", lambda connection, hello: None, greeting_s=3600)
    with ExitStack() as all_callers:
        slow = all_callers.enter_context(socket.create_connection(place, source_address=("127.0.0.2", 0)))
        assert heard_word(slow).keys() == {"question"}
        strangers = [all_callers.enter_context(socket.create_connection(place)) for _ in range(20)]
        for stranger in strangers[:-4]:
            stranger.settimeout(60)
            with suppress(ConnectionLost):
                heard_word(stranger)  # its question may have been sent before it was turned away
                read_exactly(stranger, 1)
        slow.sendall(word(b"{}"))
        assert heard_word(slow) == {"proof": ""}, "he is answered"
    door.close()
