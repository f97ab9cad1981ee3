"""What a relay passes on between the driver and the ranks of its machine; the ranks are threads here."""

import socket
from collections.abc import Iterator

import pytest
import torch
from tls_between import pair

from megarl.processes.channels.connection import Connection, ConnectionLost, connect
from megarl.processes.channels.links import Relay, Relayed


@pytest.fixture
def parts() -> Iterator[tuple[Relayed, Relay]]:
    """The driver's end of a relay to two ranks, and the relay."""
    theirs, ours = pair()
    theirs.sock.settimeout(None)
    relay = Relay(theirs, num_ranks=2)
    yield Relayed(ours, (4, 5)), relay
    ours.close()
    relay.close()


def call_home(relay: Relay, rank: int) -> Connection:
    return connect(relay.address, relay.token, {"rank": rank}, timeout_s=20)


def test_a_call_goes_to_all_ranks_and_a_payload_to_its_own(parts: tuple[Relayed, Relay]) -> None:
    driver, relay = parts
    ranks = [call_home(relay, 4), call_home(relay, 5)]
    assert {driver.receive().rank, driver.receive().rank} == {4, 5}, "both are announced"
    driver.send({"method": "double"}, {5: {"x": torch.tensor([3.0])}})
    assert ranks[0].receive() == ({"method": "double"}, {})
    header, tensors = ranks[1].receive()
    assert (header, tensors["x"].tolist()) == ({"method": "double"}, [3.0])
    ranks[1].send({"ok": True}, {"x": torch.tensor([6.0])})
    message = driver.receive()
    assert (message.rank, message.header, message.tensors["x"].tolist()) == (5, {"ok": True}, [6.0])


def test_a_rank_that_ends_is_told_of_and_a_stranger_keeps_none_out(parts: tuple[Relayed, Relay]) -> None:
    driver, relay = parts
    host, port = relay.address.rsplit(":", 1)
    with socket.create_connection((host, int(port))):
        first, _second = call_home(relay, 4), call_home(relay, 5)
        assert {driver.receive().rank, driver.receive().rank} == {4, 5}
    first.close()
    message = driver.receive()
    assert (message.rank, message.header) == (4, None)


def test_ranks_lose_their_connection_with_the_driver_and_no_other_comes_in(parts: tuple[Relayed, Relay]) -> None:
    driver, relay = parts
    rank = call_home(relay, 4)
    driver.receive()
    driver.connection.close()
    with pytest.raises(ConnectionLost):
        rank.receive()
    with pytest.raises(OSError):
        call_home(relay, 5)
