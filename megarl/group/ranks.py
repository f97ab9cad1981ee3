"""The ranks of a group that run on one machine: the torchrun agent which starts them, and how it is ended."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from megarl.secret import without_tokens

ADDRESS, TOKEN = "MEGARL_GROUP_ADDRESS", "MEGARL_GROUP_TOKEN"
FIRST_GPU = "MEGARL_FIRST_GPU"
_END_S = 10.0  # for each of: asked over the wire, terminated, killed


@dataclass(frozen=True)
class Share:
    """What one machine has of a group.  Example: of ranks 6..13 with 8 a node, [Share(0, 6, 0, 2), Share(1, 0, 2, 6)].

    Ranks are counted within the group, GPUs within the machine.
    """

    node: int
    first_gpu: int
    first_rank: int
    num_ranks: int


@dataclass(frozen=True)
class RanksLaunch:
    """How the ranks of one share are started; all strings and numbers, so that it crosses a wire."""

    worker: str  # module of `python -m`
    device: str  # auto | cpu | cuda
    log_dir: str
    num_ranks: int
    first_gpu: int = 0
    num_shares: int = 1  # machines of the group
    share: int = 0  # which of them this is
    master_address: str = ""  # where the machines of the group meet; one alone needs none
    master_port: int = 0


def shares(first_rank: int, num_ranks: int, per_node: int) -> list[Share]:
    """How the ranks of a group that begins at a GPU of the whole run lie over its machines."""
    found: list[Share] = []
    done = 0
    while done < num_ranks:
        node, gpu = divmod(first_rank + done, per_node)
        here = min(per_node - gpu, num_ranks - done)
        found.append(Share(node, gpu, done, here))
        done += here
    return found


class RanksProcess:
    """A torchrun agent and its ranks.  They call home at `address`; they end when that connection does."""

    def __init__(self, launch: RanksLaunch, address: str, token: str) -> None:
        log_dir = Path(launch.log_dir)
        log_dir.mkdir(parents=True, exist_ok=True)
        self.log = log_dir / "torchrun.log"
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *_arguments(launch), "-m", launch.worker],
                env=_environment(launch, address, token),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C at the terminal reaches the driver, which ends the ranks in order
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """It has been asked, over the connections of its ranks: wait for that, then terminate, then kill it."""
        for insist in (lambda: None, self._process.terminate, self._process.kill):
            insist()
            try:
                self._process.wait(timeout=_END_S)
                return
            except subprocess.TimeoutExpired:
                continue


def _arguments(launch: RanksLaunch) -> list[str]:
    if launch.num_shares == 1:
        meeting = ["--nnodes=1", "--master-addr=127.0.0.1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        meeting += ["--local-addr=127.0.0.1"]
    else:
        meeting = [f"--nnodes={launch.num_shares}", f"--node-rank={launch.share}", "--rdzv-backend=static"]
        meeting += [f"--master-addr={launch.master_address}", f"--master-port={launch.master_port}"]
    return [*meeting, f"--nproc-per-node={launch.num_ranks}", "--redirects=3", f"--log-dir={launch.log_dir}"]


def _environment(launch: RanksLaunch, address: str, token: str) -> dict[str, str]:
    env = {**without_tokens(os.environ), ADDRESS: address, TOKEN: token, FIRST_GPU: str(launch.first_gpu)}
    if launch.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""  # Megatron takes CUDA wherever torch sees it
    if launch.device != "cuda":
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.num_ranks)))
    return env


def use_interface_of(address: str) -> None:
    """Have gloo and NCCL, here and in children, speak over the interface that has this address, unless they are told.

    Left alone gloo takes what the machine's name resolves to, which on many machines is loopback.
    """
    interface = interface_of(address)
    for library in ("GLOO", "NCCL"):
        if interface is not None:
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)


def interface_of(address: str) -> str | None:
    """Name of the network interface with this address; any loopback address belongs to the loopback interface."""
    wanted = ipaddress.ip_address(address)
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            has = ipaddress.ip_address(entry.address.partition("%")[0])
            if has == wanted or (has.is_loopback and wanted.is_loopback):
                return name
    return None
