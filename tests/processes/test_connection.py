"""What passes between the driver and its ranks."""

import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from megarl.processes.connection import Connection, ConnectionLost
from megarl.processes.seal import HEAD, LARGEST, Opener, Sealer, caller_keys

KEYS = caller_keys("a token", "the challenges of both ends")


def pair() -> tuple[Connection, Connection]:
    a, b = socket.socketpair()
    return Connection(a, KEYS), Connection(b, KEYS.of_peer())


def test_a_message_arrives_as_it_was_sent() -> None:
    here, there = pair()
    tensors = {"tokens": torch.arange(5, dtype=torch.int32), "x": torch.ones(2, 3).t()}
    here.send({"method": "update", "arguments": {"größe": [1, 2.5, None]}}, tensors)
    header, got = there.receive()
    assert header == {"method": "update", "arguments": {"größe": [1, 2.5, None]}}
    assert torch.equal(got["tokens"], tensors["tokens"])
    assert got["tokens"].dtype == torch.int32
    assert torch.equal(got["x"], tensors["x"])


@pytest.mark.parametrize("size", [0, 1, LARGEST - 1, LARGEST, LARGEST + 1])
def test_a_payload_of_any_size_is_the_parts_that_were_sent(size: int) -> None:
    here, there = pair()
    parts = [bytes(range(7)), b"a" * size, b"b" * 3]
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(here.send_bytes, {}, parts)
        assert there.receive_bytes() == ({}, bytearray(b"".join(parts)))
        sent.result()


def test_closing_a_wire_ends_the_wait_of_another_thread_and_of_the_other_side() -> None:
    here, there = pair()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(here.receive)
        here.close()
        with pytest.raises(ConnectionLost):
            waiting.result(timeout=10)
    with pytest.raises(ConnectionLost):
        there.receive()


def records_of(*headers: str) -> list[bytes]:
    """The records that the caller sends for messages with these headers, one record each."""
    sender, between = socket.socketpair()
    connection, records = Connection(sender, KEYS), []
    with sender, between:
        for header in headers:
            connection.send({"do": header})
            records.append(between.recv(4096))
    return records


def heard_from(records: Iterable[bytes]) -> list[str]:
    """What the other end takes for orders, until it takes the connection for lost, which it has to do."""
    between, receiver = socket.socketpair()
    connection, heard = Connection(receiver, KEYS.of_peer()), []
    with between:
        for record in records:
            with suppress(BrokenPipeError):  # it closed the connection at an earlier record
                between.sendall(record)
    with pytest.raises(ConnectionLost):
        while True:
            heard.append(connection.receive()[0]["do"])
    return heard


def flipped(record: bytes, at: int) -> bytes:
    return record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]


PLAIN = b'\x00\x00\x00\x0f\x00\x00\x00\x00\x00\x00\x00\x00{"do": "server"}'
BACK = Sealer(KEYS.receive)


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        pytest.param(lambda a, b, c: [a, b, c], ["a", "b", "c"], id="nothing"),
        pytest.param(lambda a, b, c: [a, a, b, c], ["a"], id="repeats"),
        pytest.param(lambda a, b, c: [a, c, b], ["a"], id="swaps"),
        pytest.param(lambda a, b, c: [a, c], ["a"], id="leaves out"),
        pytest.param(lambda a, b, c: [b, c], [], id="leaves out the first"),
        pytest.param(lambda a, b, c: [a, b[:-1]], ["a"], id="cuts"),
        pytest.param(lambda a, b, c: [a, PLAIN, b, c], ["a"], id="puts in a plain order"),
        pytest.param(lambda a, b, c: [a, flipped(b, HEAD - 1), c], ["a"], id="changes the length"),
        pytest.param(lambda a, b, c: [a, flipped(b, HEAD), c], ["a"], id="changes the first byte"),
        pytest.param(lambda a, b, c: [a, flipped(b, len(b) - 1), c], ["a"], id="changes the tag"),
        pytest.param(lambda a, b, c: [BACK.seal(b"x" * 30), a, b, c], [], id="sends back the receiver's own"),
        pytest.param(lambda a, b, c: [b"\xff" * HEAD, a, b, c], [], id="announces four gigabytes"),
        pytest.param(lambda a, b, c: [bytes(HEAD), a, b, c], [], id="announces nothing"),
    ],
)
def test_whatever_somebody_in_between_does_nothing_is_taken_that_was_not_sent(
    change: Callable[[bytes, bytes, bytes], list[bytes]], taken: list[str]
) -> None:
    assert heard_from(change(*records_of("a", "b", "c"))) == taken


def test_somebody_in_between_reads_nothing_and_can_change_no_byte() -> None:
    first, second = records_of("a program to start", "a program to start")
    assert b"program" not in first + second
    assert first[HEAD:] != second[HEAD:], "the same order looks different each time"
    for at in range(len(first)):
        assert heard_from([flipped(first, at)]) == []


def test_the_keys_are_those_of_the_token_and_the_challenges_and_differ_by_direction() -> None:
    found = {caller_keys(token, both) for token in ("one", "two") for both in ("a b", "a c")}
    assert len({key for keys in found for key in keys}) == 8
    record = Sealer(KEYS.send).seal(b"x")
    with pytest.raises(ValueError, match="was not sealed by the peer"):
        Opener(caller_keys("another token", "the challenges of both ends").send).open(record[:HEAD], record[HEAD:])
