"""The faults that strike a run: a table, one row for each class."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import psutil
from chaos_run import LIMIT_S, ChaosRun

STAGES = ("gen", "old_log_prob", "values", "update_critic", "update_actor", "update_weights")


@dataclass(frozen=True)
class Fault:
    """`strike` does the damage, and starts the run again if that ended its driver; `rng` chooses among victims.

    `kind`: process | reply | reward | number | file | episode.  `order`: the part whose orders have to be taken before
    the fault counts as survived.
    """

    name: str
    kind: str
    strike: Callable[[ChaosRun, random.Random], None]
    order: str | None = None


def _send(victims: Callable[[ChaosRun], list[psutil.Process]], number: signal.Signals) -> Callable[..., None]:
    def strike(run: ChaosRun, rng: random.Random) -> None:
        run.wait("a victim", lambda: bool(victims(run)))
        rng.choice(victims(run)).send_signal(number)

    return strike


def _order(part: str, kind: str, count: int = 1) -> Callable[..., None]:
    return lambda run, rng: run.order(part, kind, count)


def _driver_killed(run: ChaosRun, rng: random.Random) -> None:
    children = run.processes()
    run.driver.kill()
    run.driver.wait()
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive, f"children outlived the driver: {alive}"
    run.start()


def _power_lost(run: ChaosRun, rng: random.Random) -> None:
    run.kill_all()
    run.start()


def _driver_terminated(run: ChaosRun, rng: random.Random) -> None:
    run.driver.terminate()
    assert run.driver.wait(LIMIT_S) == 128 + signal.SIGTERM, run.tail()
    run.start()


def _server_slowed(run: ChaosRun, rng: random.Random) -> None:
    """From now on a server takes seconds longer for each reply; the run has to find it."""
    before = run.last.get("rollout/slow_servers", 0.0)
    run.order("reply", "throttle")
    run.wait("the end of a slow server", lambda: run.last.get("rollout/slow_servers", 0.0) > before)


def _save_damaged(run: ChaosRun, rng: random.Random) -> None:
    """One bit of the newest save is flipped while nobody runs."""
    run.kill_all()
    saves = sorted(file.parent for file in (run.folder / "checkpoints").glob("step_*/manifest.json"))
    files = [file for file in saves[-1].rglob("*") if file.is_file() and file.stat().st_size > 1000]
    file = rng.choice(sorted(files))
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    run.start()


def _line_torn(run: ChaosRun, rng: random.Random) -> None:
    """The last line of a file of the run is half written when it dies."""
    run.kill_all()
    with (run.folder / rng.choice(("metrics.jsonl", "samples.jsonl", "visits.jsonl"))).open("a") as file:
        file.write('{"step": 1, "ti')
    run.start()


def _second_owner(run: ChaosRun, rng: random.Random) -> None:
    """The same command is started beside the run, which must not notice."""
    second = subprocess.run(run.command, env=run.environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert second.returncode == 2, second.stderr
    assert "Traceback" not in second.stderr


PROCESSES = [
    Fault("rank killed", "process", _send(ChaosRun.ranks, signal.SIGKILL)),
    Fault("rank stopped", "process", _send(ChaosRun.ranks, signal.SIGSTOP)),
    Fault("collector killed", "process", _send(ChaosRun.collectors, signal.SIGKILL)),
    Fault("collector stopped", "process", _send(ChaosRun.collectors, signal.SIGSTOP)),
    Fault("server killed", "process", _send(ChaosRun.servers, signal.SIGKILL)),
    Fault("server stopped", "process", _send(ChaosRun.servers, signal.SIGSTOP)),
    Fault("driver killed", "process", _driver_killed),
    Fault("driver terminated", "process", _driver_terminated),
    Fault("power lost", "process", _power_lost),
    Fault("second run in the folder", "process", _second_owner),
]
REPLIES = [
    *(
        Fault(f"reply: {kind}", "reply", _order("reply", kind, 2), order="reply")
        for kind in ("nan", "null", "short", "negative", "beyond", "text", "cut", "error", "reset", "slow")
    ),
    Fault("server hangs while healthy", "reply", _order("reply", "hang"), order="reply"),
    Fault("server slow", "reply", _server_slowed, order="reply"),
    Fault("server with old weights", "reply", _order("reply", "restart"), order="reply"),
]
REWARDS = [
    Fault(f"reward: {kind}", "reward", _order("reward", kind), order="reward") for kind in ("raise", "hang", "exit")
]
NUMBERS = [
    Fault("loss not finite", "number", _order("loss", "nan"), order="loss"),
    Fault("loss explodes", "number", _order("loss", "huge"), order="loss"),
]
FILES = [
    Fault("save damaged", "file", _save_damaged),
    Fault("line torn", "file", _line_torn),
]
EPISODES = [
    Fault(f"episode: {kind}", "episode", _order("episode", kind), order="episode") for kind in ("raise", "hang", "exit")
]
