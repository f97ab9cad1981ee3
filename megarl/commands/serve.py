"""`megarl serve`: starts, health-checks and restarts servers on this machine.

They are those of rollout.urls whose host is this machine; or, with rollout.join, rollout.num_servers servers that join
the run whose driver listens there.  It takes the same settings as the run, so that trainers and servers can be started
with the same arguments.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from megarl.commands.this_machine import NODE_ADDRESS
from megarl.config import Config
from megarl.io.auth import given_server_token, needed_token, server_token
from megarl.io.terminal import say
from megarl.machines.joining import Membership
from megarl.machines.nodes import JOIN_S
from megarl.processes.channels.waiting import Wait
from megarl.servers.external import place
from megarl.servers.launch import EngineLaunch
from megarl.servers.server_process import ServerDied
from megarl.servers.supervisor import Servers, State
from megarl.trainer.servers.make_servers import server_launch, supervision

_LOOK_S = 1.0


def main(config: Config) -> int:
    """Serves until it is interrupted, or the run that it has joined ends; raises ServerDied if no server is left."""
    if config.rollout.join:
        return _serve_a_run(config, config.rollout.join)
    launches = launches_here(config)
    key = given_server_token(os.environ) or server_token({}, needed_token(os.environ, "megarl serve"))
    logs = config.trainer.run_dir / "logs" / f"servers_{socket.gethostname()}"
    with _started(config, launches, key, logs) as servers:
        _watch(servers, lambda: False)
    return 0


def _serve_a_run(config: Config, address: str) -> int:
    """Servers that join a run; an interrupt lets the run take back what they are generating, a second one does not."""
    token = needed_token(os.environ, f"rollout.join={address}")
    membership = Membership(address, token, Wait(JOIN_S, _say), source=os.environ.get(NODE_ADDRESS))
    with closing(membership):
        launches = launches_to_join(config, membership.own_address)
        logs = config.trainer.run_dir / "logs" / f"servers_{socket.gethostname()}_{os.getpid()}"
        with _started(config, launches, server_token(os.environ, token), logs) as servers:
            membership.name(servers.urls)
            try:
                _watch(servers, lambda: membership.has_ended)
                _say("the run is over")
            except KeyboardInterrupt:
                _say(f"leaving the run at {address}; a second interrupt does not wait for it")
                if not membership.leave(config.trainer.call_timeout_s):
                    _say("the run did not answer")
    return 0


@contextmanager
def _started(config: Config, launches: Sequence[EngineLaunch], key: str, logs: Path) -> Iterator[Servers]:
    with Servers(launches, key, logs, supervision(config)) as servers:
        servers.start(lambda ready, total: _say(f"{ready} of {total} servers"))
        _say(f"serving at {' '.join(servers.urls)}; logs: {logs}")
        yield servers


def _watch(servers: Servers, is_over: Callable[[], bool]) -> None:
    """Restart servers that die, until it is over.  Raises ServerDied if no server is left."""
    while not is_over():
        for event in servers.poll():
            _say(f"{event.url} is {event.state}: {event.reason}")
            if all(state is State.OUT for state in servers.states):
                raise ServerDied(f"no server is left; {event.reason}")
        time.sleep(_LOOK_S)


def launches_to_join(config: Config, host: str) -> list[EngineLaunch]:
    """rollout.num_servers servers at this address of this machine, on its GPUs from rollout.first_gpu (0) on."""
    rollout, launch = config.rollout, replace(server_launch(config), host=host)
    first, size = rollout.first_gpu or 0, rollout.tensor_model_parallel_size
    return [replace(launch, first_gpu=first + index * size) for index in range(rollout.num_servers)]


def launches_here(config: Config) -> list[EngineLaunch]:
    """One launch for each url of this machine, in their order; they use its GPUs from rollout.first_gpu (0) on.

    Raises ValueError if no url is of this machine.
    """
    rollout, launch = config.rollout, server_launch(config)
    found: list[EngineLaunch] = []
    for number, url in enumerate(rollout.urls):
        where = place(url)
        if (address := own_address_of(where["host"])) is not None:
            gpu = (rollout.first_gpu or 0) + len(found) * rollout.tensor_model_parallel_size
            seed = rollout.seed + number - len(found)  # the supervisor adds the number on this machine
            own = {"host": address, "port": where["port"], "tls": where["tls"], "name": where["host"]}
            found.append(replace(launch, **own, first_gpu=gpu, random_seed=seed))
    if not found:
        raise ValueError(
            f"rollout.urls={list(rollout.urls)}: no host of these is this machine ({socket.gethostname()}); "
            "expected http://HOST:PORT or https://HOST:PORT of the servers to start here"
        )
    return found


def own_address_of(host: str) -> str | None:
    """The address of a host name if it is one of this machine, otherwise None."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    if NODE_ADDRESS in os.environ:
        return os.environ[NODE_ADDRESS] if os.environ[NODE_ADDRESS] in addresses else None
    own = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    return min(addresses & own, default=None)


_say = partial(say, stderr=False)
