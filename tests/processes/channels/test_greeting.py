"""Who is let in: a peer that proves it knows the token, and nobody else."""

import queue
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tls_between import between, end_of

from megarl.io import callers
from megarl.io.tls import peer_context, server_certificate
from megarl.processes.channels.connection import ConnectionLost, WireRefused, connect, greet
from megarl.processes.channels.listener import Listener

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


def test_the_token_itself_never_crosses_the_wire() -> None:
    """A listener that is not ours learns nothing by which it could call others, and is not believed."""
    heard = bytearray()

    def thief(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        end = peer_context("guess", calls=False)
        end.verify_mode = ssl.CERT_NONE  # he takes everybody
        with suppress(OSError), sock:
            received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = end.wrap_bio(received, to_send, server_side=True)
            while data := sock.recv(2**16):
                heard.extend(data)
                received.write(data)
                with suppress(ssl.SSLError):
                    heard.extend(tls.read(2**16))
                sock.sendall(to_send.read())

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        done = threads.submit(thief, listener)
        with pytest.raises(WireRefused, match="has another token"):
            connect(f"127.0.0.1:{listener.getsockname()[1]}", "secret", {"rank": 3}, timeout_s=5)
        done.result()
    assert heard and b"secret" not in heard and b"rank" not in heard
    peer_context.__globals__["_peer_context"].cache_clear()


def test_nobody_who_passes_on_a_greeting_can_say_who_the_caller_is() -> None:
    """With the handshake of another he still cannot make a hello."""
    middle = between()
    middle.from_host.sendall(b'\x00\x00\x00\x0b\x00\x00\x00\x00\x00\x00\x00\x00{"node": 2}' + b" " * 16)
    with pytest.raises(ConnectionLost):
        middle.host.receive()
    middle.close()


def test_a_greeting_that_was_recorded_lets_nobody_in(door: Door) -> None:
    """The keys are new for each connection."""
    address, greets = door
    host, port = address.rsplit(":", 1)
    recorded = bytearray()

    def pass_on(source: socket.socket, target: socket.socket, note: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                note.extend(data)
                target.sendall(data)

    answer = greets()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(3) as threads:
        friend = threads.submit(connect, f"127.0.0.1:{listener.getsockname()[1]}", "secret", {"node": 1}, timeout_s=20)
        caller, _ = listener.accept()
        with caller, socket.create_connection((host, int(port))) as there:
            ways = [(caller, there, recorded), (there, caller, bytearray())]
            passes = [threads.submit(pass_on, *way) for way in ways]
            connection, hello = answer.result()
            assert hello == {"node": 1}
            friend.result().close()
            connection.close()
            wait(passes)
    again = greets()
    with socket.create_connection((host, int(port))) as thief:
        thief.sendall(recorded)
        assert again.result() is None


def first_word(context: ssl.SSLContext) -> bytes:
    """What a caller with this context says first."""
    received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(received, to_send, server_hostname="megarl")
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return to_send.read()


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"[]" * 100, id="JSON"),
        pytest.param(b"\xff\xfe\x00" * 10, id="no text"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x16\x03\x01\xff\xff" + bytes(2**17), id="a record that is too long"),
        pytest.param(b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + bytes(2**14 - 4), id="a word that fills the memory"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: megarl\r\n\r\n", id="another protocol"),
        pytest.param(first_word(peer_context("secret", calls=True))[:-1], id="half of a friend's first word"),
        pytest.param(first_word(peer_context("secret", calls=True)), id="a friend's first word alone"),
    ],
)
def test_whatever_a_stranger_says_it_is_not_let_in(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(greet, ours, "secret", 5)
        with suppress(BrokenPipeError):
            theirs.sendall(said)
            theirs.shutdown(socket.SHUT_WR)
        assert answer.result() is None
    assert ours.fileno() == -1, "closed"


@pytest.mark.parametrize("certificate", [None, "guess"])
def test_a_caller_whose_certificate_is_not_of_the_token_is_not_let_in(certificate: str | None, tmp_path: Path) -> None:
    """Also one who takes every host for his."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate is not None:
        (tmp_path / "own.pem").write_bytes(server_certificate(certificate, ["megarl"]))
        context.load_cert_chain(tmp_path / "own.pem")
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as threads, theirs:
        answer = threads.submit(greet, ours, "secret", 5)
        with suppress(OSError), context.wrap_socket(theirs, server_hostname="megarl") as stranger:
            stranger.sendall(b'\x00\x00\x00\x0b\x00\x00\x00\x00\x00\x00\x00\x00{"rank": 3}')
            stranger.recv(1)
        assert answer.result() is None


def test_a_stranger_who_speaks_slowly_has_no_longer_than_others() -> None:
    """A byte now and then does not begin the time anew."""
    ours, theirs = socket.socketpair()
    spoken = 0
    with ThreadPoolExecutor(1) as threads, theirs:
        answer = threads.submit(greet, ours, "secret", 0.3)
        with suppress(OSError):
            for byte in first_word(peer_context("secret", calls=True)):
                theirs.sendall(bytes([byte]))
                spoken += 1
                if answer.done():
                    break
                wait([answer], timeout=0.05)
        assert answer.result() is None
    assert spoken < 100


def test_more_silent_strangers_than_there_are_places_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be waited for an hour; a friend takes the place of one of them at once."""
    monkeypatch.setattr(callers, "MOST", 8)
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
    monkeypatch.setattr(callers, "MOST", 4)
    listener = socket.create_server(("127.0.0.1", 0))
    place = listener.getsockname()
    arrived: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    door = Listener(listener, "secret", lambda connection, hello: arrived.put(hello), greeting_s=3600)
    with ExitStack() as all_callers:
        slow = all_callers.enter_context(socket.create_connection(place, source_address=("127.0.0.2", 0)))
        strangers = [all_callers.enter_context(socket.create_connection(place)) for _ in range(20)]
        for stranger in strangers[:-4]:
            stranger.settimeout(60)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", "turned away"
        end_of(slow, calls=True, token="secret").send({"rank": 3})
        assert arrived.get(timeout=60) == {"rank": 3}
    door.close()
