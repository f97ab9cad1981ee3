"""A run that a test disturbs: its processes, what it is doing, and starting it again when it was ended."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil
from programs import runs
from ring_cases import lines

from megarl.metrics.reading.status import read_status
from megarl.servers.server_process import free_ports

PARTS = Path(__file__).parent / "parts"
LOOK_S = 0.002
LIMIT_S = 600.0


def copy_parts(folder: Path) -> Path:
    """The plug-in, server, reward and agent of runs under chaos, with a folder for the orders of one run."""
    parts = folder / "parts_of_chaos"
    shutil.copytree(PARTS, parts, ignore=shutil.ignore_patterns("__pycache__"))
    (parts / "orders").mkdir()
    return parts


class ChaosRun:
    """Example: with ChaosRun(["recipe=quickstart"], Path("runs/quickstart"), parts, num_servers=2) as run: ...

    `start` starts the same command again after the driver has ended, as a user or Slurm would.
    """

    def __init__(self, words: Sequence[str], folder: Path, parts: Path, *, num_servers: int) -> None:
        """`folder`: of the run; `parts`: see `copy_parts`."""
        self.folder, self.num_servers = folder, num_servers
        self._rows, self._read = list[Mapping[str, Any]](), (0, 0)
        self.orders, self.log = parts / "orders", parts / "run.log"
        self.command = [sys.executable, "-m", "megarl", "train", *words]
        path = os.pathsep.join([str(parts), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.environment = {**os.environ, "PYTHONPATH": path}
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.driver.poll() is None:
            self.kill_all()

    def start(self, *more: str) -> None:
        """Start the driver; `more`: words for this start only."""
        with self.log.open("ab") as out:
            self.driver = subprocess.Popen([*self.command, *more], stdout=out, stderr=out, env=self.environment)

    def end(self) -> int:
        """End the driver as a scheduler does; its exit code."""
        self.driver.terminate()
        return self.driver.wait(LIMIT_S)

    # ---- what it is doing

    @property
    def step(self) -> int:
        """The last step that was trained and logged."""
        return int(rows[-1]["step"]) if (rows := self.rows) else 0

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """The metrics of all steps; a file that has not changed is not read again."""
        file = self.folder / "metrics.jsonl"
        if not file.exists():
            return []
        found = file.stat()
        if (state := (found.st_ino, found.st_size)) != self._read:
            self._rows, self._read = [row for row in lines(file) if "timing_s/step" in row], state
        return self._rows

    @property
    def stage(self) -> str:
        """The stage that the living driver is in; empty before its first."""
        status = read_status(self.folder)
        return status["stage"] if status is not None and status["pid"] == self.driver.pid else ""

    @property
    def is_over(self) -> bool:
        return self.driver.poll() is not None

    def wait(self, what: str, is_there: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait for something; a driver that ends meanwhile, or a wait without end, fails the test with the log."""
        deadline = time.monotonic() + limit_s
        while not is_there():
            assert not self.is_over, f"the run ended with {self.driver.returncode} before {what}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"{what} did not come in {limit_s:.0f} s:\n{self.tail()}"
            time.sleep(LOOK_S)

    def saves(self) -> list[Path]:
        """The folders of its finished saves, the oldest first."""
        return sorted(file.parent for file in (self.folder / "checkpoints").glob("step_*/manifest.json"))

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])

    # ---- faults that its parts commit themselves, see parts/chaos_claims.py

    def order(self, part: str, kind: str, count: int = 1) -> None:
        """Leave `count` orders for a part: run.order("reply", "nan", 3)."""
        for number in range(count):
            (self.orders / f"{part}.{kind}.{number}").touch()

    def ordered(self, part: str) -> int:
        """How many orders for this part nobody has taken yet."""
        return len(list(self.orders.glob(f"{part}.*")))

    # ---- its processes

    def processes(self, *words: str) -> list[psutil.Process]:
        """Living descendants of the driver whose command line has one of these words; none given: all."""
        found = []
        for process in psutil.Process(self.driver.pid).children(recursive=True):
            try:
                if not words or any(runs(process, word) for word in words):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def ranks(self) -> list[psutil.Process]:
        return self.processes("megarl.roles.worker")

    def servers(self) -> list[psutil.Process]:
        return self.processes("chaos_server.py", "megarl.hf_server.main")

    def collectors(self) -> list[psutil.Process]:
        return self.processes("run_collector")

    def kill_all(self) -> None:
        """What a power loss does."""
        processes = [*self.processes(), psutil.Process(self.driver.pid)]
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.driver.wait()
        psutil.wait_procs(processes, timeout=60)


class ChaosCluster(ChaosRun):
    """A run on two machines with a spare one, each an agent with an address of its own, which servers may join."""

    def __init__(self, words: Sequence[str], folder: Path, parts: Path) -> None:
        """`words`: without those of machines.  There is a server on each machine."""
        (port,) = free_ports(["127.0.0.1"])
        self.join = [*words, f"rollout.join=127.0.0.1:{port}"]
        self.others: dict[int, subprocess.Popen[bytes]] = {}
        self.guests: list[subprocess.Popen[bytes]] = []
        more = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.spare_nodes=1"]
        os.environ["MEGARL_TOKEN"] = "the secret of these tests"
        super().__init__([*self.join, *more], folder, parts, num_servers=2)

    def start(self, *more: str) -> None:
        """Start the driver and the other machines."""
        super().start("trainer.node_rank=0", *more)
        for number in (1, 2):
            self.start_machine(number)

    def start_machine(self, number: int) -> None:
        """Start a machine, or one that was lost again: it is the spare one then."""
        environment = {**self.environment, "MEGARL_NODE_ADDR": f"127.0.0.{number + 1}"}
        with self.log.with_name(f"machine_{number}.log").open("ab") as out:
            command = [*self.command, f"trainer.node_rank={number}"]
            self.others[number] = subprocess.Popen(command, stdout=out, stderr=out, env=environment)

    def start_guest(self) -> None:
        """Start a server that joins the run."""
        self.num_servers += 1
        with self.log.with_name("guests.log").open("ab") as out:
            command = [*self.command[:3], "serve", *self.join, "rollout.num_servers=1"]
            self.guests.append(subprocess.Popen(command, stdout=out, stderr=out, env=self.environment))

    def guest(self) -> subprocess.Popen[bytes]:
        """A server that joined, which the caller lets go; if there is none, one is started."""
        if not self.guests:
            self.start_guest()
            self.wait("the guest", lambda: self.rows[-1].get("push/servers") == self.num_servers)
        self.num_servers -= 1
        return self.guests.pop()

    def working(self) -> int | None:
        """The number of the machine, not the driver's, that has a rank; None while there is none."""
        return next((number for number, process in self.others.items() if _is_worker(process)), None)

    def kill_all(self) -> None:
        for process in (*self.others.values(), *self.guests):
            process.kill()
            process.wait()
        super().kill_all()


def _is_worker(machine: subprocess.Popen[bytes]) -> bool:
    if machine.poll() is not None:
        return False
    children = psutil.Process(machine.pid).children(recursive=True)
    return any(runs(child, "megarl.roles.worker") for child in children)
