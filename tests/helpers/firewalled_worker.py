"""The worker `echo_worker`, whose rank 1 is behind a firewall: what comes to ports that it opens is dropped."""

from __future__ import annotations

import ctypes
import socket
import struct

import echo_worker
import torch.distributed as dist

from megarl.group.follow import follow
from megarl.group.message import Setup
from megarl.processes.channels import store

SO_ATTACH_FILTER = 26
DROP = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # of Berkeley's packet filter: return 0
listen = store.listen


def listen_behind(address: str, *ports: int) -> socket.socket:
    listener = listen(address, *ports)
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(DROP)))
    return listener


if __name__ == "__main__":
    if echo_worker.RANK == 1:
        store.listen = listen_behind
    follow({Setup: echo_worker.setup}, lambda: None, lambda: dist.get_rank() == 0)
