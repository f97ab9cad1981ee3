"""Listening sockets and network interfaces: each at one address, never on all interfaces."""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import re
import socket
from collections.abc import Iterator, Sequence

import psutil

# The variables of trainer.ports and trainer.private_network, for the processes of a run.
_PORTS, _PRIVATE = "MEGARL_PORTS", "MEGARL_PRIVATE_NETWORK"


def listen(address: str, *ports: int, backlog: int | None = None) -> socket.socket:
    """A listening TCP socket at exactly this address, at the first of these ports that is free.  Raises OSError.

    Port 0 is any free one; without a port it is one of `ports_to_try`.
    """
    family, taken = socket.AF_INET6 if ":" in address else socket.AF_INET, OSError()
    for port in ports or ports_to_try(address):
        try:
            return socket.create_server((address, port), family=family, backlog=backlog)
        except OSError as error:
            taken = error
            if error.errno != errno.EADDRINUSE:
                break
    raise taken


def port_range(text: str) -> range:
    """41000-41999 -> these ports; an empty range for anything else than two ports from 1024 on."""
    given = re.fullmatch(r"([0-9]{4,5})-([0-9]{4,5})", text)
    first, last = map(int, given.groups()) if given else (0, 0)
    return range(first, last + 1) if 1024 <= first <= last < 2**16 else range(0)


def use_ports(text: str | None) -> None:
    """From now on this process and those that it starts take ports of that range, where others can reach them."""
    os.environ.pop(_PORTS, None)
    if text is not None:
        os.environ[_PORTS] = text


def use_private_network(is_private: bool) -> None:
    """From now on this process and those that it starts encrypt nothing between two processes that both do so."""
    os.environ.pop(_PRIVATE, None)
    if is_private:
        os.environ[_PRIVATE] = "1"


def is_network_private() -> bool:
    return _PRIVATE in os.environ


def ports_to_try(host: str, usual: Sequence[int] = (0,)) -> Iterator[int]:
    """Ports for a listener at this address: `usual`, or all of the range, mixed; after those OSError says so.

    0: any free one.
    """
    text = os.environ.get(_PORTS)
    if text is None or is_loopback(host):
        yield from usual
    else:
        yield from random.SystemRandom().sample(ports := port_range(text), len(ports))
        raise OSError(errno.EADDRINUSE, f"trainer.ports={text}: {host} has none of them left; expected a wider range")


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
