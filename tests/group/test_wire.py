"""What passes between the driver and its ranks."""

from __future__ import annotations

import socket
import struct
import threading

import pytest
import torch

from megarl.group.wire import Wire, WireClosed, accept, connect


def pair() -> tuple[Wire, Wire]:
    a, b = socket.socketpair()
    return Wire(a), Wire(b)


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
    with pytest.raises(WireClosed):
        there.receive()


def test_only_the_token_opens_the_door() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        stranger = connect(address, "guess", {"rank": 0}, timeout_s=5)
        assert accept(listener, "secret") is None
        with pytest.raises(WireClosed):
            stranger.receive()
        friend = connect(address, "secret", {"rank": 3}, timeout_s=5)
        arrival = accept(listener, "secret")
        assert arrival is not None
        assert arrival[1] == {"rank": 3}, "the token is not passed on"
        friend.close()


def test_a_stranger_cannot_announce_a_message_that_fills_the_memory() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as stranger,
    ):
        stranger.sendall(struct.pack(">IQ", 10, 2**62))
        assert accept(listener, "secret") is None
