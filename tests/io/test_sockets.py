"""Listening at one address, and never on all interfaces."""

from collections.abc import Iterator
from itertools import islice

import pytest

from megarl.io.sockets import interface_of, interface_variables, listen, port_range, ports_to_try, use_ports


def test_the_interface_of_an_address() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    assert interface_of("127.0.0.2") == interface_of("localhost") == loopback
    assert interface_of("203.0.113.9") is None, "an address of nobody's here"
    assert interface_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
    assert interface_variables("203.0.113.9") == {}


@pytest.fixture
def a_range() -> Iterator[None]:
    use_ports("41000-41009")
    yield
    use_ports(None)


@pytest.mark.usefixtures("a_range")
def test_a_range_of_ports_is_for_addresses_that_other_machines_reach() -> None:
    for address in ("10.0.0.1", "fd00::1"):
        ports = ports_to_try(address, (29500, 0))
        assert sorted(islice(ports, 10)) == list(range(41000, 41010))
        with pytest.raises(
            OSError, match=f"trainer.ports=41000-41009: {address} has none of them left; expected a wid"
        ):
            next(ports)
    for address in ("127.0.0.1", "::1", "localhost"):
        assert list(ports_to_try(address, (29500, 0))) == [29500, 0]
    use_ports(None)
    assert list(ports_to_try("10.0.0.1")) == [0]


def test_the_first_free_port_is_taken_and_none_is_an_error() -> None:
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with listen("127.0.0.1", port, 0) as other:
            assert other.getsockname()[1] not in (0, port)
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("text", ["41000", "41009-41000", "80-90", "41000-70000", "a-b", "41000-41009x", "-"])
def test_no_range_of_ports(text: str) -> None:
    assert not port_range(text)
