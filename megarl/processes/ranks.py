"""Starts and ends the ranks of a group on a machine."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import TimeoutExpired

from megarl.io.auth import without_tokens
from megarl.io.sockets import interface_variables
from megarl.processes import stacks
from megarl.processes.lifetime import MemoryEnd, last_lines
from megarl.processes.programs import Program, start_program

ADDRESS, TOKEN, PARENT = "MEGARL_GROUP_ADDRESS", "MEGARL_GROUP_TOKEN", "MEGARL_PARENT_PID"
STORE, STORE_TOKEN = "MEGARL_STORE_ADDRESS", "MEGARL_STORE_TOKEN"  # of the group's rendezvous store
OWN_ADDRESS = "MEGARL_OWN_ADDRESS"  # of the rank's machine
FIRST_GPU = "MEGARL_FIRST_GPU"
# Where torch's flight recorder writes the last collectives; torch appends the number of the rank.
FLIGHT_RECORDS = "TORCH_FR_DUMP_TEMP_FILE"
END_S = 10.0  # wait after the "close" message, and again after SIGKILL
_LOOK_S = 0.05


@dataclass(frozen=True)
class Share:
    """The part of a group on a machine.  Example: ranks 6..13, 8 per node: [Share(0, 6, 0, 2), Share(1, 0, 2, 6)].

    Ranks are counted within the group, GPUs within the machine.
    """

    node: int
    first_gpu: int
    first_rank: int
    num_ranks: int


@dataclass(frozen=True)
class RanksLaunch:
    """How to start the ranks of a share; only strings and numbers, so that it can be sent as JSON."""

    worker: str  # module of `python -m`
    device: str  # auto | cpu | cuda
    log_dir: str
    num_ranks: int
    first_gpu: int = 0
    first_rank: int = 0
    world_size: int = 0  # ranks of the whole group; 0: num_ranks
    address: str = "127.0.0.1"  # of this machine; gloo and NCCL listen on the interface with this address
    store: str = ""  # host:port of the group's rendezvous store, which the driver hosts
    store_token: str = field(default="", repr=False)
    environment: tuple[tuple[str, str], ...] = ()  # variables of the ranks, where the user has not set them


def shares(first_rank: int, num_ranks: int, per_node: int) -> list[Share]:
    """The shares of a group over the machines; `first_rank` is counted over all GPUs of the run."""
    found: list[Share] = []
    done = 0
    while done < num_ranks:
        node, gpu = divmod(first_rank + done, per_node)
        here = min(per_node - gpu, num_ranks - done)
        found.append(Share(node, gpu, done, here))
        done += here
    return found


class RanksProcess:
    """The processes of a share, one per rank: a processes.lifetime.ProcessHandle.

    They connect to `address`, and end when that connection ends.

    Ranks end with the thread that creates this object: see processes.lifetime.
    """

    def __init__(self, launch: RanksLaunch, address: str, token: str) -> None:
        log_dir = Path(launch.log_dir)
        log_dir.mkdir(parents=True, exist_ok=True)
        self._logs = [log_dir / f"rank_{launch.first_rank + local}.log" for local in range(launch.num_ranks)]
        shared = {**_environment(launch), ADDRESS: address, TOKEN: token, PARENT: str(os.getpid())}
        self._processes: list[Program] = []
        self._memory = MemoryEnd()
        self._failed: int | None = None  # the first process that was seen to fail
        self._ended = False
        try:
            for local, path in enumerate(self._logs):
                self._processes.append(_start(launch.worker, path, shared | _world(launch, local)))
        except BaseException:
            self.end(END_S)
            raise

    @property
    def pid(self) -> int:
        """Process id of its first rank."""
        return self._processes[0].pid

    @property
    def log(self) -> Path:
        """Log of the rank that failed, else of the first rank."""
        return self._logs[self._first_failed() or 0]

    def exit_code(self) -> int | None:
        """None while ranks run; the code of a failed rank as soon as one has failed, since the others wait for it."""
        if (failed := self._first_failed()) is not None:
            return self._processes[failed].returncode
        return None if None in [process.poll() for process in self._processes] else 0

    def log_tail(self) -> str:
        return last_lines(self.log) + self._memory.words(self.exit_code())

    def end(self, grace_s: float) -> None:
        """Wait for the ranks to end after "close", unless one failed; then take the stacks of the others and kill them.

        Child processes of a rank end with it. A second call does nothing: the process ids may belong to others by then.
        """
        if self._ended:
            return
        self._ended = True
        if self._processes and not self.exit_code():
            self._wait(grace_s)
        stacks.take(self._processes, self._logs[: len(self._processes)])
        for process in self._processes:
            with suppress(ProcessLookupError, PermissionError):  # its session has the writers that Megatron forks
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(TimeoutExpired):  # a process in a kernel call, such as a GPU driver's, ends later
                process.wait(END_S)

    def _first_failed(self) -> int | None:
        if self._failed is None:
            self._failed = next((local for local, process in enumerate(self._processes) if process.poll()), None)
        return self._failed

    def _wait(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while any(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)


def _start(worker: str, log_path: Path, environment: dict[str, str]) -> Program:
    """Ctrl-C at the terminal reaches only the driver, which then ends the ranks."""
    with open(log_path, "ab") as log:
        return start_program([sys.executable, "-u", "-m", worker], env=environment, log=log)


def _environment(launch: RanksLaunch) -> dict[str, str]:
    """The environment of all ranks of a share; a network interface that the user has set is kept."""
    env = {**interface_variables(launch.address), **without_tokens(os.environ), FIRST_GPU: str(launch.first_gpu)}
    if launch.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""  # Megatron uses CUDA if torch sees it
    if launch.device != "cuda":
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.num_ranks)))
    recorder = {
        FLIGHT_RECORDS: f"{launch.log_dir}/flight_record_rank_",
        "TORCH_FR_BUFFER_SIZE": "2000",  # collectives
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # also where torch itself finds a collective that has timed out
    }
    return recorder | dict(launch.environment) | env


def _world(launch: RanksLaunch, local: int) -> dict[str, str]:
    """The variables that tell a rank its place, and where the store is: see processes.channels.store."""
    numbers = {
        "RANK": launch.first_rank + local,
        "LOCAL_RANK": local,
        "WORLD_SIZE": launch.world_size or launch.num_ranks,
        "LOCAL_WORLD_SIZE": launch.num_ranks,
        STORE: launch.store,
        STORE_TOKEN: launch.store_token,
        OWN_ADDRESS: launch.address,
    }
    return {name: str(value) for name, value in numbers.items()}
