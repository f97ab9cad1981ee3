"""What passes between the driver and its ranks."""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch

from megarl.processes.connection import Connection, ConnectionLost, Listener, WireRefused, connect, greet


def pair() -> tuple[Connection, Connection]:
    a, b = socket.socketpair()
    return Connection(a), Connection(b)


def test_a_message_arrives_as_it_was_sent() -> None:
    here, there = pair()
    tensors = {"tokens": torch.arange(5, dtype=torch.int32), "x": torch.ones(2, 3).t()}
    here.send({"method": "update", "arguments": {"größe": [1, 2.5, None]}}, tensors)
    header, got = there.receive()
    assert header == {"method": "update", "arguments": {"größe": [1, 2.5, None]}}
    assert torch.equal(got["tokens"], tensors["tokens"])
    assert got["tokens"].dtype == torch.int32
    assert torch.equal(got["x"], tensors["x"])


def test_messages_larger_than_a_socket_buffer_arrive_whole() -> None:
    here, there = pair()
    large = torch.randn(1_000_000)
    sender = threading.Thread(target=here.send, args=({"n": 1}, {"large": large}))
    sender.start()
    assert torch.equal(there.receive()[1]["large"], large)
    sender.join()


def test_the_end_of_the_other_side_is_an_error() -> None:
    here, there = pair()
    here.close()
    with pytest.raises(ConnectionLost):
        there.receive()


@pytest.fixture
def host() -> Iterator[tuple[str, Callable[[str], Future[Any]]]]:
    """An address where somebody knows "secret", and how to knock there with another token."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as threads:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        answer = threads.submit(lambda: greet(listener.accept()[0], "secret"))
        yield address, lambda token: threads.submit(lambda: (connect(address, token, {"rank": 3}, timeout_s=5), answer))


def test_who_knows_the_token_is_let_in(host: tuple[str, Callable[[str], Future[Any]]]) -> None:
    friend, answer = host[1]("secret").result()
    connection, hello = answer.result()
    assert hello == {"rank": 3}, "nothing of the greeting is passed on"
    friend.send({"hello": 1})
    assert connection.receive()[0] == {"hello": 1}
    friend.close()


def test_who_does_not_is_told_so_and_gets_nowhere(host: tuple[str, Callable[[str], Future[Any]]]) -> None:
    with pytest.raises(WireRefused, match="has another token"):
        host[1]("guess").result()


def test_the_token_itself_never_crosses_the_wire() -> None:
    """A listener that is not ours learns nothing by which it could call others, and is not believed."""
    heard = []

    def thief(listener: socket.socket) -> None:
        connection = Connection(listener.accept()[0])
        connection.send({"question": "0" * 32})
        heard.append(connection.receive()[0])
        connection.send({"proof": heard[0]["proof"]})

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        done = threads.submit(thief, listener)
        with pytest.raises(WireRefused):
            connect(f"127.0.0.1:{listener.getsockname()[1]}", "secret", {"rank": 3}, timeout_s=5)
        done.result()
    assert "secret" not in json.dumps(heard)


def message(header: bytes, body: bytes = b"", *, body_size: int | None = None) -> bytes:
    return struct.pack(">IQ", len(header), len(body) if body_size is None else body_size) + header + body


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(message(b"[]"), id="a list"),
        pytest.param(message(b"17"), id="a number"),
        pytest.param(message('{"question": "1", "proof": "größe"}'.encode()), id="a proof beyond ASCII"),
        pytest.param(message(b'{"question": "\\ud800", "proof": "\\ud800"}'), id="half a character"),
        pytest.param(message(b'{"question": {}, "proof": []}'), id="no strings"),
        pytest.param(message(b"[" * 4000), id="deep"),
        pytest.param(message(b"\xff\xfe\x00"), id="no text"),
        pytest.param(message(b"{}", b"no tensors"), id="a payload"),
        pytest.param(message(b"{}", body_size=2**62), id="a payload that fills the memory"),
        pytest.param(struct.pack(">IQ", 2**31, 0), id="a header that does"),
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
            for byte in message(b" " * 1000 + b"{}"):
                theirs.sendall(bytes([byte]))
                spoken += 1
                if answer.done():
                    break
                wait([answer], timeout=0.05)
        assert answer.result() is None
    assert spoken < 100


def test_strangers_who_say_nothing_hold_up_nobody() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    arrived: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    door = Listener(listener, "secret", lambda connection, hello: arrived.put(hello))
    with ExitStack() as strangers:
        for _ in range(20):
            strangers.enter_context(socket.create_connection((host, port)))
        friend = connect(f"{host}:{port}", "secret", {"rank": 3}, timeout_s=5)  # less than a stranger is waited for
        assert arrived.get(timeout=5) == {"rank": 3}
        friend.close()
    door.close()
    with pytest.raises(OSError):
        socket.create_connection((host, port), timeout=5)


def test_closing_a_wire_ends_the_wait_of_another_thread() -> None:
    here, _there = pair()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(here.receive)
        here.close()
        with pytest.raises(ConnectionLost):
            waiting.result(timeout=10)
