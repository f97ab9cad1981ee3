"""The ranks of a group that run on one machine: how they are started, where they meet, and how they are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megarl.auth import without_tokens
from megarl.processes.lifetime import last_lines
from megarl.sockets import host_store, interface_variables

ADDRESS, TOKEN, PARENT = "MEGARL_GROUP_ADDRESS", "MEGARL_GROUP_TOKEN", "MEGARL_PARENT_PID"
FIRST_GPU = "MEGARL_FIRST_GPU"
END_S = 10.0  # for each of: asked over the wire, terminated
_LOOK_S = 0.05


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
    first_rank: int = 0
    world_size: int = 0  # ranks of the whole group; 0: these are all
    address: str = "127.0.0.1"  # of this machine; gloo and NCCL listen at the interface that has it
    master_address: str = "127.0.0.1"  # where the machine of rank 0 hosts the store of the group
    master_port: int = 0  # 0 where rank 0 is: a free one is taken
    environment: tuple[tuple[str, str], ...] = ()  # variables of the ranks, where the user has not set them


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
    """The processes of a share, one a rank: a processes.handle.ProcessHandle.

    They call home at `address`, and end when that connection does.

    The store of the group is served here where rank 0 is: a store of torchrun's would listen on all interfaces, and
    its rendezvous unpickles what anyone puts there. Ranks die with the thread that makes this: see processes.lifetime.
    """

    def __init__(self, launch: RanksLaunch, address: str, token: str) -> None:
        log_dir = Path(launch.log_dir)
        log_dir.mkdir(parents=True, exist_ok=True)
        self._logs = [log_dir / f"rank_{launch.first_rank + local}.log" for local in range(launch.num_ranks)]
        self._store = host_store(launch.master_address, launch.master_port) if launch.first_rank == 0 else None
        self.port = launch.master_port if self._store is None else self._store.port  # of the store
        shared = {**_environment(launch), ADDRESS: address, TOKEN: token, PARENT: str(os.getpid())}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._failed: int | None = None  # the first of them that was seen to fail
        self._ended = False
        try:
            for local, path in enumerate(self._logs):
                self._processes.append(_start(launch.worker, path, shared | _world(launch, local, self.port)))
        except BaseException:
            self.end(END_S)
            raise

    @property
    def pid(self) -> int:
        """Of its first rank."""
        return self._processes[0].pid

    @property
    def log(self) -> Path:
        """Of the rank that failed, or else of the first."""
        return self._logs[self._first_failed() or 0]

    def exit_code(self) -> int | None:
        """None while all run; of a rank that failed as soon as one has, since the others only wait for it."""
        if (failed := self._first_failed()) is not None:
            return self._processes[failed].returncode
        return None if None in [process.poll() for process in self._processes] else 0

    def log_tail(self) -> str:
        return last_lines(self.log)

    def ask_to_end(self) -> None:
        """Terminate those that run.  A group asks in another way before, over their connections."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def end(self, grace_s: float) -> None:
        """They have been asked over their connections: wait for that unless one failed, then terminate, then kill.

        Whatever a rank started ends with it. A second call does nothing: the numbers may be other processes' by then.
        """
        if self._ended:
            return
        self._ended = True
        if self._processes and not self.exit_code():
            self._wait(grace_s)
        self.ask_to_end()
        self._wait(END_S)
        for process in self._processes:
            with suppress(ProcessLookupError, PermissionError):  # its session holds the writers that Megatron forks
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # one in the kernel's hands, such as a driver's, ends when it can
                process.wait(END_S)
        self._store = None

    def _first_failed(self) -> int | None:
        if self._failed is None:
            self._failed = next((local for local, process in enumerate(self._processes) if process.poll()), None)
        return self._failed

    def _wait(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while any(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)


def _start(worker: str, log_path: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with open(log_path, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", worker],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a Ctrl-C at the terminal reaches the driver, which ends them in order
        )


def _environment(launch: RanksLaunch) -> dict[str, str]:
    """What all ranks of a share have; a user's own choice of the network's interface is kept."""
    env = {**interface_variables(launch.address), **without_tokens(os.environ), FIRST_GPU: str(launch.first_gpu)}
    if launch.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""  # Megatron takes CUDA wherever torch sees it
    if launch.device != "cuda":
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.num_ranks)))
    return dict(launch.environment) | env


def _world(launch: RanksLaunch, local: int, port: int) -> dict[str, str]:
    """What tells torch.distributed which rank a process is, and where the store is."""
    numbers = {
        "RANK": launch.first_rank + local,
        "LOCAL_RANK": local,
        "WORLD_SIZE": launch.world_size or launch.num_ranks,
        "LOCAL_WORLD_SIZE": launch.num_ranks,
        "MASTER_ADDR": launch.master_address,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # torch's word for: somebody else hosts it
    }
    return {name: str(value) for name, value in numbers.items()}
