"""Listening sockets, rendezvous stores and network interfaces: each at one address, never on all interfaces."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def listen(address: str, port: int = 0) -> socket.socket:
    """A listening TCP socket at exactly this address; port 0 takes a free one.  Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


def address_in(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` is written as; None if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it; a name but localhost counts as that of a network's address."""
    address = address_in(host)
    return host == "localhost" if address is None else address.is_loopback


def host_store(address: str, port: int = 0, *, timeout_s: float = 300.0) -> TCPStore:
    """The store for the rendezvous of a group's ranks, hosted by this process at exactly this address.

    torch's own store and torchrun's listen on every interface. Values in this store are never unpickled.
    The store is closed with the returned object; `store.port` is the port. Raises OSError if it cannot listen there.
    """
    from torch.distributed import TCPStore  # a slow import, only needed to host a store

    listener = listen(address, port)
    port = int(listener.getsockname()[1])
    limit = timedelta(seconds=timeout_s)
    return TCPStore(
        address, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def interface_of(address: str) -> str | None:
    """Name of this machine's interface with this address or host name; any loopback address gives the loopback's.

    None if no interface has it.
    """
    wanted = ipaddress.ip_address(socket.getaddrinfo(address, None)[0][4][0])
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            has = ipaddress.ip_address(entry.address.partition("%")[0])
            if has == wanted or (has.is_loopback and wanted.is_loopback):
                return name
    return None


def interface_variables(address: str) -> dict[str, str]:
    """Environment variables that make gloo and NCCL use this machine's interface with that address.

    Without them gloo uses the address that the machine's name resolves to. Empty if no interface has the address.
    """
    name = interface_of(address)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # =: exactly it
