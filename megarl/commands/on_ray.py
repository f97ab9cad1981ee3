"""`megarl train --on ray ...`: the machines of a run are nodes of a Ray cluster.

    ray job submit -- megarl train --on ray recipe=NAME trainer.nnodes=2

Ray places an actor on each machine, and the actor runs one megarl as its child.  No rank, server or tensor is an object
of Ray.  Machine 0 is an actor too, as the entry point of a job is often on a head without GPUs.  The node of an actor
that is lost is replaced by Ray; its megarl joins the run again, or goes on from the last save if it is machine 0.

`ray job stop` kills the entry point 3 s after SIGTERM (RAY_JOB_STOP_WAIT_TIME_S of the head), too soon for a save.  So
the actors are detached: asked by the entry point, or SILENCE_S after it has gone, machine 0 saves and ends the run, and
all actors leave.
"""

from __future__ import annotations

import os
import runpy
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.commands.machines import machines_of
from megarl.config import Config, layout_word
from megarl.io.auth import given_token
from megarl.io.terminal import say
from megarl.machines.nodes import announced
from megarl.processes.lifetime import die_with_parent
from megarl.processes.signals import EXIT_TERMINATED

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

SILENCE_S = 15.0
BEAT_S = 2.0
SAY_S = 30.0  # between two lines about machines that are awaited
LEAVE_S = 30.0  # for which the others are waited for once machine 0 has ended
RESTARTS = 3  # of machine 0's megarl after failures of its own; the run's are trainer.max_restarts
AGAIN = {"max_task_retries": -1}  # of an actor's method: one that is placed anew does it again
ENDED = (0, 2, EXIT_TERMINATED)  # done, a mistake in the settings, asked to end: nothing to start again


def main(command: str, words: list[str], config: Config) -> int:
    """Run `megarl COMMAND WORDS` on a Ray cluster; returns the exit code of machine 0.

    Raises ValueError without Ray or its cluster.
    """
    if config.trainer.resume_mode == "disable":
        raise ValueError(
            "trainer.resume_mode=disable: a machine 0 that is placed again would begin anew and drop what it has; "
            "expected auto, with another trainer.experiment_name for a new run"
        )
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # else equal lines of machines are folded, and tables are torn
    try:
        import ray
    except ImportError as error:
        raise ValueError(f"--on ray: {error}; expected the package ray (pip install 'megarl[ray]')") from error
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), namespace="megarl")
    except ConnectionError as error:
        raise ValueError(
            f"--on ray: {str(error).splitlines()[0]}; expected a cluster (`ray start --head`), or `ray job submit`"
        ) from error
    wanted = machines_of(config, layout_word(words))
    has_gpus = wanted.gpus and ray.cluster_resources().get("GPU")
    if wanted.gpus and not has_gpus and config.trainer.device == "cuda":
        raise ValueError("trainer.device=cuda: no node of this Ray cluster has a GPU")
    each = {"CPU": float(wanted.cpus if has_gpus else config.trainer.n_gpus_per_node)}
    each |= {"GPU": float(wanted.gpus)} if has_gpus else {}
    group = _placed(each, wanted.nodes + wanted.spares)
    return _Run(group, each, command, words, str(config.trainer.run_dir)).wait()


def _placed(each: dict[str, float], count: int) -> PlacementGroup:
    """`count` machines with these resources, each on a node of its own; waits for them."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(
        [each] * count, strategy="STRICT_SPREAD", name=f"megarl-{secrets.token_hex(4)}", lifetime="detached"
    )
    try:
        while not ray.wait([group.ready()], timeout=SAY_S)[0]:
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            there = "; ".join(f"{node.get('CPU', 0):g} CPU {node.get('GPU', 0):g} GPU" for node in alive)
            say(f"waiting for {count} free Ray nodes with {_shown(each)}; the cluster has {len(alive)}: {there}")
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _shown(each: dict[str, float]) -> str:
    return " ".join(f"{number:g} {name}" for name, number in each.items())


class _Run:
    """The entry point's side of a run."""

    def __init__(
        self, group: PlacementGroup, each: dict[str, float], command: str, words: Sequence[str], run_dir: str
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self._group, self._asked = ray, group, False
        name, token = f"megarl-{secrets.token_hex(4)}", given_token(os.environ) or secrets.token_hex(32)
        machine = ray.remote(max_restarts=-1, max_concurrency=8)(Machine)
        first: Any = None
        self._machines = []
        for rank in range(group.bundle_count):
            actor = machine.options(
                name=f"{name}-{rank}",
                lifetime="detached",
                num_cpus=each["CPU"],
                num_gpus=each.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            ).remote(rank, group.bundle_count, token, os.getcwd(), run_dir, group.id.hex())
            first = first or actor
            self._machines.append(actor)
        self._ends = [
            actor.run.options(**AGAIN).remote([command, *words], first if rank else None)
            for rank, actor in enumerate(self._machines)
        ]

    def wait(self) -> int:
        """Until machine 0 has ended, or another one finds a mistake in the settings; passes signals on."""
        from ray.util.placement_group import remove_placement_group

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)
        signal.signal(signal.SIGUSR1, lambda *_: self._machines[0].signal.remote(signal.SIGUSR1) and None)
        first, *others = self._ends
        beaten, told, code = 0.0, False, None
        while not self._ray.wait([first], timeout=0.5)[0]:
            if time.monotonic() - beaten > BEAT_S:
                beaten = time.monotonic()
                self._machines[0].beat.remote()
            if others and code is None:
                ended, _ = self._ray.wait(others, num_returns=len(others), timeout=0)
                code = next((found for found in self._ray.get(ended) if found == 2), None)
            if (self._asked or code) and not told:
                told = True
                say("asked to end: machine 0 saves and ends the run" if self._asked else "the run cannot start")
                self._ray.get(self._machines[0].signal.options(**AGAIN).remote(signal.SIGTERM))
        code = code or self._ray.get(first)
        for machine in self._machines[1:]:
            machine.dismiss.remote()
        if others:
            self._ray.wait(others, num_returns=len(others), timeout=LEAVE_S)
        time.sleep(BEAT_S)  # for the last lines of their logs
        for machine in self._machines:
            self._ray.kill(machine)
        remove_placement_group(self._group)
        return int(code)

    def _ask(self, *_: object) -> None:
        self._asked = True


class Machine:
    """The actor on one machine: runs its megarl."""

    def __init__(self, rank: int, count: int, token: str, folder: str, run_dir: str, group: str) -> None:
        """`folder`: of the entry point; where it is not here, the machine works in that of its job."""
        self._rank, self._count, self._token, self._group = rank, count, token, group
        self._folder = folder if Path(folder).is_dir() else os.getcwd()
        self._run_dir, self._since = Path(self._folder, run_dir), time.time()
        self._child: subprocess.Popen[bytes] | None = None
        self._asked, self._heard = False, time.monotonic()

    def driver(self) -> tuple[str, int] | None:
        """Address and port of the driver, on machine 0; None while there is none of this start."""
        import ray

        try:
            is_new = (self._run_dir / "driver_port").stat().st_mtime >= self._since
            return (ray.util.get_node_ip_address(), announced(self._run_dir)) if is_new else None
        except OSError:
            return None

    def beat(self) -> None:
        """The entry point is there."""
        self._heard = time.monotonic()

    def dismiss(self) -> None:
        """Machine 0 has ended for good, and with it soon the megarl of this one."""
        self._asked = True

    def signal(self, number: int) -> None:
        self._asked |= number == signal.SIGTERM
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def run(self, words: list[str], first: Any) -> int:
        """The exit code of this machine's megarl.  `first`: the actor of machine 0, on all others."""
        import ray

        address, code = ray.util.get_node_ip_address(), 1
        env = dict(os.environ, MEGARL_TOKEN=self._token, MEGARL_NODE_ADDR=address, PYTHONUNBUFFERED="1")
        env.pop("OMP_NUM_THREADS", None)  # Ray's, for a task of its own, not for ranks
        for turn in range(RESTARTS + 1) if first is None else iter(int, 1):
            place = [f"trainer.node_rank={self._rank}", f"trainer.master_addr={address}"] if self._count > 1 else []
            if first is not None:
                if (found := self._found(first)) is None:
                    break
                host, port = found
                place = [place[0], f"trainer.master_addr={host}", f"trainer.master_port={port}"]
            say(f"machine {self._rank} is {address}, in {self._folder}{f' (start {turn + 1})' if turn else ''}")
            self._since = time.time()
            command = [sys.executable, "-m", __name__, str(os.getpid()), *words, *place]
            self._child = subprocess.Popen(command, env=env, cwd=self._folder)
            while (ended := self._child.poll()) is None:
                time.sleep(0.2)
                if self._rank == 0 and not self._asked and self._is_alone():
                    say("the entry point of the job is gone: the run saves and ends")
                    self.signal(signal.SIGTERM)
            code = 128 - ended if ended < 0 else ended
            if code in ENDED or self._asked:
                break
        say(f"machine {self._rank} ended with {code}")
        if self._rank == 0:
            threading.Thread(target=self._leave, daemon=True).start()
        return code

    def _found(self, first: Any) -> tuple[str, int] | None:
        """The driver, which moves with its actor, once it is there; None if it does not come any more."""
        import ray

        said, found = time.monotonic(), None
        while found is None and not self._asked:
            with suppress(ray.exceptions.RayError):  # machine 0 is being placed anew
                found = ray.get(first.driver.remote())
            if time.monotonic() - said > SAY_S:
                said = time.monotonic()
                say(f"machine {self._rank} waits for the driver, which has not started yet")
            time.sleep(0.0 if found else 0.5)
        return found

    def _is_alone(self) -> bool:
        return time.monotonic() - self._heard > SILENCE_S

    def _leave(self) -> None:
        """Remove all actors, if there is no entry point that does it."""
        from ray import PlacementGroupID
        from ray.util.placement_group import PlacementGroup, remove_placement_group

        time.sleep(LEAVE_S + SILENCE_S)
        if self._is_alone():
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(self._group))))


if __name__ == "__main__":
    # Not by SIGTERM, which megarl takes as a wish of its user.
    die_with_parent(int(sys.argv[1]), heeds_signals=True)
    sys.argv[1:] = sys.argv[2:]
    runpy.run_module("megarl", run_name="__main__")
