"""How the process of a server gets its ports and is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megarl.servers.server_process import Machine, MachineGone, ServerDied, ServerProcess


def choose_ports(processes: Sequence[ServerProcess]) -> None:
    """Set the missing ports of every launch: one for HTTP, and one for the rendezvous of its ranks."""
    by_machine: dict[Machine, list[ServerProcess]] = {}
    for process in processes:
        if process.launch.port is None or process.launch.group_port is None:
            by_machine.setdefault(process.machine, []).append(process)
    for machine, its in by_machine.items():
        ports = iter(machine.free_ports([process.launch.host for process in its for _ in range(2)]))
        for process in its:
            launch, port, group_port = process.launch, next(ports), next(ports)
            process.launch = replace(launch, port=launch.port or port, group_port=launch.group_port or group_port)


def spawn(process: ServerProcess) -> ServerDied | None:
    """Start its process in this thread, which outlives the server; threads of health checks may not.

    Returns why that was not possible, for example a full disk, which is assumed to concern this server only.  Raises
    MachineGone.
    """
    try:
        process.spawn()
    except MachineGone:
        raise
    except OSError as error:
        return ServerDied(f"server {process.launch.index} did not start: {error}")
    return None


def spawn_elsewhere(process: ServerProcess) -> ServerDied | None:
    """Start it again with other ports."""
    process.end()
    process.launch = replace(process.launch, port=None, group_port=None)
    choose_ports([process])
    return spawn(process)
