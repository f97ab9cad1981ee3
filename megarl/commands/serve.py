"""`megarl serve`: starts, health-checks and restarts the servers of rollout.urls whose host is this machine.

It takes the same settings as the run, so that trainers and servers can be started with the same arguments.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace

import psutil
from rich.console import Console

from megarl.auth import SERVER_VARIABLE, needed_token, server_token
from megarl.commands.this_machine import NODE_ADDRESS
from megarl.config import Config
from megarl.servers.external import place
from megarl.servers.launch import EngineLaunch
from megarl.servers.server_process import ServerDied
from megarl.servers.supervisor import Servers, State
from megarl.trainer.build import server_launch, supervision

_LOOK_S = 1.0


def main(config: Config) -> int:
    """Serves until it is interrupted; raises ServerDied if no server is left."""
    console, launches = Console(soft_wrap=True), launches_here(config)
    key = os.environ.get(SERVER_VARIABLE) or server_token({}, needed_token(os.environ, "megarl serve"))
    logs = config.trainer.run_dir / "logs" / f"servers_{socket.gethostname()}"
    patience = supervision(config)
    with Servers(launches, key, logs, patience) as servers:
        servers.start(lambda ready, total: console.print(f"{ready} of {total} servers", highlight=False))
        console.print(f"serving at {' '.join(servers.urls)}; logs: {logs}", highlight=False)
        while not all(state is State.OUT for state in servers.states):
            for event in servers.poll():
                console.print(f"{event.url} is {event.state}: {event.reason}", markup=False, highlight=False)
            time.sleep(_LOOK_S)
    raise ServerDied(f"no server is left; see {logs}")


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
            found.append(replace(launch, host=address, port=where["port"], first_gpu=gpu, random_seed=seed))
    if not found:
        raise ValueError(
            f"rollout.urls={list(rollout.urls)}: no host of these is this machine ({socket.gethostname()}); "
            "expected http://HOST:PORT of the servers to start here"
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
