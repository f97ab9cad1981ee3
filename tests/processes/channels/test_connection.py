"""What passes between the driver and its ranks."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from tls_between import Between, between, pair

from megarl.io.sockets import use_private_network
from megarl.processes.channels.connection import _PART, _RECORD, _SIZES, Connection, ConnectionLost

HEAD = 5  # bytes of a record before its ciphertext


def test_a_message_arrives_as_it_was_sent() -> None:
    here, there = pair()
    tensors = {"tokens": torch.arange(5, dtype=torch.int32), "x": torch.ones(2, 3).t()}
    here.send({"method": "update", "arguments": {"größe": [1, 2.5, None]}}, tensors)
    header, got = there.receive()
    assert header == {"method": "update", "arguments": {"größe": [1, 2.5, None]}}
    assert torch.equal(got["tokens"], tensors["tokens"])
    assert got["tokens"].dtype == torch.int32
    assert torch.equal(got["x"], tensors["x"])


@pytest.mark.parametrize("size", [0, 1, _RECORD - 1, _RECORD, _RECORD + 1, _PART - 1, _PART, _PART + 1])
def test_a_payload_of_any_size_is_the_parts_that_were_sent(size: int) -> None:
    here, there = pair()
    parts = [bytes(range(7)), b"a" * size, b"b" * 3]
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(here.send_bytes, {}, parts)
        assert there.receive_bytes() == ({}, b"".join(parts))
        sent.result()


def test_threads_send_and_receive_at_the_same_time() -> None:
    """Each message arrives whole, in the order of its thread."""
    here, there = pair()
    sizes = [1, 300_000, 20, 70_000] * 25

    def say(end: Connection, thread: int) -> None:
        for number, size in enumerate(sizes):
            end.send_bytes({"thread": thread, "number": number}, [bytes([thread]) * size])

    def hear(end: Connection) -> dict[int, list[int]]:
        heard: dict[int, list[int]] = {1: [], 2: []}
        for _ in range(2 * len(sizes)):
            header, body = end.receive_bytes()
            assert body == bytes([header["thread"]]) * sizes[header["number"]]
            heard[header["thread"]].append(header["number"])
        return heard

    with ThreadPoolExecutor(6) as threads:
        jobs = [threads.submit(say, end, thread) for end in (here, there) for thread in (1, 2)]
        heard = [threads.submit(hear, end) for end in (here, there)]
        for job in jobs:
            job.result(60)
        assert [each.result(60) for each in heard] == [dict.fromkeys((1, 2), list(range(len(sizes))))] * 2


def test_messages_that_came_together_are_known_to_be_there() -> None:
    here, there = pair()
    for number in range(3):
        here.send({"number": number})
    numbers = [there.receive()[0]["number"]]
    while there.has_more:
        numbers.append(there.receive()[0]["number"])
    assert numbers == [0, 1, 2]


def test_closing_a_wire_ends_the_wait_of_another_thread_and_of_the_other_side() -> None:
    here, there = pair()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(here.receive)
        here.close()
        with pytest.raises(ConnectionLost):
            waiting.result(timeout=10)
    with pytest.raises(ConnectionLost):
        there.receive()


@pytest.mark.parametrize("sizes", [(2, 2**45), (2**31, 0)])
def test_a_message_that_is_announced_and_fits_no_memory_ends_the_connection_in_a_sentence(
    sizes: tuple[int, int],
) -> None:
    """From a peer that knows the token."""
    here, there = pair()
    here.sock.sendall(here._encrypted(memoryview(_SIZES.pack(*sizes) + b"{}")))
    with pytest.raises(ConnectionLost, match=f"^it sends a message of {sum(sizes)} bytes, too many for memory$"):
        there.receive()
    assert there.sock.fileno() == -1


def test_what_is_only_announced_takes_no_memory() -> None:
    here, there = pair()
    here.sock.sendall(here._encrypted(memoryview(_SIZES.pack(2, 2**39) + b"{}" + bytes(100))))
    here.close()
    with pytest.raises(ConnectionLost, match="closed"):
        there.receive()


@pytest.fixture
def middle() -> Iterator[Between]:
    made = between()
    yield made
    made.close()


def heard_from(middle: Between, records: list[bytes]) -> list[str]:
    """What the host takes for orders, until it takes the connection for lost, which it has to do."""
    heard = []
    for record in records:
        with suppress(BrokenPipeError):  # it closed the connection at an earlier record
            middle.from_host.sendall(record)
    middle.from_host.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionLost):
        while True:
            heard.append(middle.host.receive()[0]["do"])
    return heard


def flipped(record: bytes, at: int) -> bytes:
    return record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]


PLAIN = b'\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00\x00{"do": "server"}'


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        pytest.param(lambda a, b, c, back: [a, b, c], ["a", "b", "c"], id="nothing"),
        pytest.param(lambda a, b, c, back: [a, a, b, c], ["a"], id="repeats"),
        pytest.param(lambda a, b, c, back: [a, c, b], ["a"], id="swaps"),
        pytest.param(lambda a, b, c, back: [a, c], ["a"], id="leaves out"),
        pytest.param(lambda a, b, c, back: [b, c], [], id="leaves out the first"),
        pytest.param(lambda a, b, c, back: [a, b[:-1]], ["a"], id="cuts"),
        pytest.param(lambda a, b, c, back: [a, PLAIN, b, c], ["a"], id="puts in a plain order"),
        pytest.param(lambda a, b, c, back: [a, flipped(b, HEAD - 1), c], ["a"], id="changes the length"),
        pytest.param(lambda a, b, c, back: [a, flipped(b, HEAD), c], ["a"], id="changes the first byte"),
        pytest.param(lambda a, b, c, back: [a, flipped(b, len(b) - 1), c], ["a"], id="changes the tag"),
        pytest.param(lambda a, b, c, back: [back, a, b, c], [], id="sends back the receiver's own"),
        pytest.param(lambda a, b, c, back: [b"\xff" * HEAD, a, b, c], [], id="announces too much"),
        pytest.param(lambda a, b, c, back: [bytes(HEAD), a, b, c], [], id="announces nothing"),
    ],
)
def test_whatever_somebody_in_between_does_nothing_is_taken_that_was_not_sent(
    middle: Between, change: Callable[[bytes, bytes, bytes, bytes], list[bytes]], taken: list[str]
) -> None:
    middle.host.send({"do": "a"})
    records = [middle.record({"do": order}) for order in ("a", "b", "c")]
    assert heard_from(middle, change(*records, middle.from_host.recv(2**16))) == taken


def test_somebody_in_between_reads_nothing_and_can_change_no_byte(middle: Between) -> None:
    order = {"do": "a program to start"}
    first, second = middle.record(order), middle.record(order)
    assert b"program" not in first + second
    assert first[HEAD:] != second[HEAD:], "the same order looks different each time"
    for at in range(len(first)):
        other = between()
        assert heard_from(other, [flipped(other.record(order), at)]) == []
        other.close()


def test_on_a_private_network_nothing_is_encrypted_if_both_ends_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_PRIVATE_NETWORK", "")  # so that it is as before at the end
    use_private_network(True)
    middle = between()
    assert middle.record({"do": "a"}) == b'\x00\x00\x00\x0b\x00\x00\x00\x00\x00\x00\x00\x00{"do": "a"}'
    middle.from_host.sendall(PLAIN)
    assert middle.host.receive()[0] == {"do": "server"}
    one, other = pair()
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(one.send, {"do": "a"}, {"x": torch.ones(10**6)})
        assert other.receive()[1]["x"].sum() == 10**6
        sent.result()
    use_private_network(False)
    assert b"program" not in between().record({"do": "a program to start"})
