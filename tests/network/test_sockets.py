"""Listening at one address, and never on all interfaces."""

from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from megarl.network.sockets import host_store, interface_of, interface_variables, listen


def listening(port: int) -> set[str]:
    """The addresses at which this process listens at a port."""
    return {
        c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port
    }


def test_a_store_listens_at_its_address_alone_and_others_reach_it_there() -> None:
    store = host_store("127.0.0.2")
    assert listening(store.port) == {"127.0.0.2"}
    other = TCPStore("127.0.0.2", store.port, is_master=False, timeout=timedelta(seconds=20))
    other.set("word", "said")
    assert store.get("word") == b"said"
    port = store.port
    del store, other
    assert not listening(port), "a store goes with its object"


def test_torchs_own_store_listens_everywhere() -> None:
    """Else `host_store` would not be needed."""
    store = TCPStore("127.0.0.2", 0, is_master=True, wait_for_workers=False)
    found = listening(store.port)
    assert found
    assert found <= {"0.0.0.0", "::"}


def test_a_taken_port_is_an_error() -> None:
    with listen("127.0.0.1") as taken, pytest.raises(OSError, match="in use"):
        host_store("127.0.0.1", taken.getsockname()[1])


def test_the_interface_of_an_address() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    assert interface_of("127.0.0.2") == interface_of("localhost") == loopback
    assert interface_of("203.0.113.9") is None, "an address of nobody's here"
    assert interface_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
    assert interface_variables("203.0.113.9") == {}
