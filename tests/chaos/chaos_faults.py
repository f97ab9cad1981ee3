"""The faults that strike a run: a table, one row for each class."""

import random
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import psutil
from chaos_run import LIMIT_S, ChaosCluster, ChaosRun

STAGES = ("gen", "old_log_prob", "update_actor", "update_weights")
WITH_CRITIC = (*STAGES, "values", "update_critic")


@dataclass(frozen=True)
class Fault:
    """`strike` does the damage, and starts the run again if that ended its driver; `rng` chooses among victims.

    The run has to notice it: by words on its console that match `says`, or by a metric `counts` that rises; with
    neither it must say nothing and count nothing.  `order`: the part whose orders have to be taken before the fault
    counts as survived.
    """

    name: str
    strike: Callable[[ChaosRun, random.Random], None]
    says: str = ""
    counts: str = ""
    order: str | None = None

    @property
    def is_quiet(self) -> bool:
        """Whether the run has no reason to notice it."""
        return not self.says and not self.counts


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
    assert run.end() == 128 + signal.SIGTERM, run.tail()
    run.start()


def _asked_to_save(run: ChaosRun, rng: random.Random) -> None:
    run.driver.send_signal(signal.SIGUSR1)


def _save_damaged(run: ChaosRun, rng: random.Random) -> None:
    """One bit of the newest save is flipped while nobody runs."""
    run.kill_all()
    files = [file for file in run.saves()[-1].rglob("*") if file.is_file() and file.stat().st_size > 1000]
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


def _manifest_torn(run: ChaosRun, rng: random.Random) -> None:
    """Of the newest save, only a part of the manifest is there."""
    run.kill_all()
    manifest = run.saves()[-1] / "manifest.json"
    content = manifest.read_bytes()
    manifest.write_bytes(content[: rng.randrange(len(content))])
    run.start()


def _machine_killed(run: ChaosRun, rng: random.Random) -> None:
    """The one that has a rank and a server; once another one has its place, it comes back as the spare one."""
    assert isinstance(run, ChaosCluster), "there are several machines"
    run.wait("a machine with a rank", lambda: run.working() is not None)
    number = run.working()
    assert number is not None, "nobody else ends machines"
    run.others[number].kill()
    run.others[number].wait()
    run.wait("a machine in its place", lambda: run.working() is not None)
    run.start_machine(number)


def _server_joins(run: ChaosRun, rng: random.Random) -> None:
    assert isinstance(run, ChaosCluster), "servers may join"
    run.start_guest()


def _server_leaves(number: signal.Signals) -> Callable[..., None]:
    def strike(run: ChaosRun, rng: random.Random) -> None:
        assert isinstance(run, ChaosCluster), "servers may join"
        run.guest().send_signal(number)

    return strike


DIED = "the ranks are started again"
AGAIN = "going on from step"
COLLECTORS = "rollout/collector_restarts"
FAILED = "rollout/failed_requests"
REFUSED = "fell back to a slower transport|is out of service"  # the first time, and when there is no slower one
SPIKE = r"a spike: .*the run goes back to step"
PROCESSES = [
    Fault("rank killed", _send(ChaosRun.ranks, signal.SIGKILL), says=DIED),
    Fault("rank stopped", _send(ChaosRun.ranks, signal.SIGSTOP), says=DIED),
    Fault("rank loops", _order("loss", "loop"), says=DIED, order="loss"),
    Fault("rank waits for ever", _order("loss", "wait"), says=DIED, order="loss"),
    Fault("collector killed", _send(ChaosRun.collectors, signal.SIGKILL), counts=COLLECTORS),
    Fault("collector stopped", _send(ChaosRun.collectors, signal.SIGSTOP), counts=COLLECTORS),
    Fault("server killed", _send(ChaosRun.servers, signal.SIGKILL), counts="push/servers_died"),
    Fault("server stopped", _send(ChaosRun.servers, signal.SIGSTOP), counts="push/servers_died"),
    Fault("driver killed", _driver_killed, says=AGAIN),
    Fault("driver terminated", _driver_terminated, says=AGAIN),
    Fault("driver asked to save", _asked_to_save),  # which it does after every step anyway
    Fault("power lost", _power_lost, says=AGAIN),
    Fault("second run in the folder", _second_owner),
]
REPLIES = [
    *(
        Fault(f"reply: {kind}", _order("reply", kind, 2), counts=FAILED, order="reply")
        for kind in ("nan", "null", "short", "negative", "beyond", "text", "cut", "error", "reset")
    ),
    Fault("reply: slow", _order("reply", "slow", 2), order="reply"),  # within rollout.request_timeout_s
    Fault("server hangs while healthy", _order("reply", "hang"), counts="push/servers_died", order="reply"),
    Fault("server slow", _order("reply", "throttle"), counts="rollout/slow_servers", order="reply"),
    Fault("server with old weights", _order("reply", "restart"), counts="push/servers_died", order="reply"),
]
PUSHES = [
    Fault("push fails", _order("push", "error"), says=REFUSED, order="push"),
    Fault("weights with a wrong bit", _order("weights", "bit"), says=REFUSED, order="weights"),
]
REWARDS = [
    *(
        Fault(f"reward: {kind}", _order("reward", kind), counts="reward/reward_error", order="reward")
        for kind in ("raise", "hang", "memory", "nan")
    ),
    # A process that ends is started again, and its sample scored once more.
    *(Fault(f"reward: {kind}", _order("reward", kind), order="reward") for kind in ("exit", "print", "fork")),
]
NUMBERS = [
    Fault("loss not finite", _order("loss", "nan"), counts="trainer/skipped_steps", order="loss"),
    Fault("loss explodes", _order("loss", "huge"), counts="trainer/skipped_steps", order="loss"),
]
ROLLBACKS = [  # of a run with trainer.on_nonfinite=rollback and trainer.spike_sigma
    Fault("loss not finite, rolled back", _order("loss", "nan"), counts="trainer/rollbacks", order="loss"),
    Fault("spike of the loss, rolled back", _order("loss", "spike"), says=SPIKE, order="loss"),
]
FILES = [
    Fault("save damaged", _save_damaged, says="is passed over"),
    Fault("manifest torn", _manifest_torn, says="is passed over"),
    Fault("line torn", _line_torn, says=AGAIN),
    Fault("disk full", _order("disk", "full"), counts="checkpoint/failed", order="disk"),
]
ALL = [*PROCESSES, *REPLIES, *PUSHES, *REWARDS, *NUMBERS, *FILES]  # of a run without agents on one machine
EPISODES = [
    Fault("episode: raise", _order("episode", "raise"), counts="agent/errors", order="episode"),
    Fault("episode: hang", _order("episode", "hang"), counts="agent/timeouts", order="episode"),
    Fault("episode: exit", _order("episode", "exit"), counts=COLLECTORS, order="episode"),
]
MACHINES = [
    Fault("machine killed", _machine_killed, says="takes the place of"),
    Fault("server joins", _server_joins, says="has its first verified weights"),
    Fault("server leaves", _server_leaves(signal.SIGTERM), says="leaves the run"),
    Fault("server disappears", _server_leaves(signal.SIGKILL), says="leaves the run"),
]
