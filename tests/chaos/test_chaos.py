"""Runs that are struck by every class of fault, at every stage of a step, and end as if nothing had happened."""

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from chaos_faults import ALL, EPISODES, MACHINES, PROCESSES, REPLIES, ROLLBACKS, STAGES, WITH_CRITIC, Fault
from chaos_run import LIMIT_S, ChaosCluster, ChaosRun, copy_parts
from ring_cases import PPO, lines, make_parts, settings

pytestmark = pytest.mark.dist
Note = Callable[[str, object], None]

SAMPLE = {
    *("rank killed", "collector stopped", "server killed", "driver terminated"),
    *("reply: nan", "server slow", "reward: exit", "loss not finite", "save damaged"),
}
ENDLESS = ["trainer.total_training_steps=100000", "trainer.test_freq=-1", "trainer.val_before_train=false"]
ENDLESS += ["actor.old_log_prob_freq=1"]  # faults strike in this stage, too
EXAMPLES = Path(__file__).parents[2] / "examples"
ACCURACY = 0.04  # two standard errors of the score on 256 held-out prompts at 0.9
SINCE_THE_START = ("trainer/rollbacks", "checkpoint/failed")  # all other metrics count in their step alone
OUTCOMES = ("trained", "filtered", "lost", "skipped")


@dataclass(frozen=True)
class Strike:
    """`stage`: of `step`, in which the fault struck, or was ordered; `taken`: in which whoever was ordered to obeyed.

    `noticed_s`: until the run said or counted it, None for a fault that it has no reason to notice; `recovered_s`:
    until a later step.  Both count from the strike on, and with the start of a driver that it ended.
    """

    fault: str
    stage: str
    step: int
    taken: str
    noticed_s: float | None
    recovered_s: float


def schedule(faults: Sequence[Fault], times: int, seed: int, stages: Sequence[str]) -> list[tuple[Fault, str]]:
    """Every fault so many times, in random order; the stages of a step take turns."""
    rng = random.Random(seed)
    order = [fault for fault in faults for _ in range(times)]
    rng.shuffle(order)
    return [(fault, stages[(number + seed) % len(stages)]) for number, fault in enumerate(order)]


def strike(run: ChaosRun, fault: Fault, stage: str, rng: random.Random) -> Strike:
    """Strike in this stage of a step, and wait until the run has noticed it and trained a step that began after it."""
    before = run.step
    run.wait(f"a step after {before}", lambda: run.step > before)
    run.wait(stage, lambda: run.stage == stage)
    watch, step, began = Watch(run, fault), run.step, time.monotonic()
    fault.strike(run, rng)
    taken, noticed = stage if fault.order is None else "", 0.0

    def is_over() -> bool:
        nonlocal taken, noticed
        if not taken and fault.order is not None and not run.ordered(fault.order):
            taken = run.stage
        if not noticed and watch.sees():
            noticed = time.monotonic() - began
        whole = run.step > step + 1 and run.rows[-1].get("push/servers") == run.num_servers
        return bool(taken) and whole and (fault.is_quiet or noticed > 0)

    run.wait(f"the end of: {fault.name}, {stage} of step {step + 1}", is_over)
    assert not (fault.is_quiet and noticed), f"{fault.name} disturbed the run:\n{run.tail()}"
    return Strike(fault.name, stage, step + 1, taken, noticed or None, time.monotonic() - began)


class Watch:
    """What a run says and counts from now on."""

    def __init__(self, run: ChaosRun, fault: Fault) -> None:
        self._run, self._fault = run, fault
        self._offset, self._step = run.log.stat().st_size, run.step

    def sees(self) -> bool:
        """Whether the fault was said or counted; of a fault that is quiet, whether anything was."""
        if name := self._fault.counts:
            before = [row for row in self._run.rows if row["step"] == self._step] if name in SINCE_THE_START else []
            least = max((float(row.get(name, 0.0)) for row in before), default=0.0)
            return any(row["step"] > self._step and float(row.get(name, 0.0)) > least for row in self._run.rows)
        return re.search(self._fault.says or r"warning: ", self._said()) is not None

    def _said(self) -> str:
        with self._run.log.open("rb") as file:
            file.seek(self._offset)
            return file.read().decode(errors="replace")


@dataclass(frozen=True)
class Account:
    """Every visit of a prompt: what became of it.  `twice` and `missing` must be empty."""

    outcomes: dict[str, int]
    twice: list[int]
    missing: list[int]


def account(folder: Path) -> Account:
    rows = lines(folder / "visits.jsonl")
    of_each = {name: [visit for row in rows for visit in row.get(name, [])] for name in OUTCOMES}
    counts = Counter(visit for visits in of_each.values() for visit in visits)
    trained = of_each["trained"]
    return Account(
        {name: len(visits) for name, visits in of_each.items()},
        sorted(visit for visit, count in counts.items() if count > 1),
        sorted(set(range(max(trained, default=-1) + 1)) - set(counts)),
    )


def survives(parts: Path) -> list[str]:
    """Settings of a run that has to survive everything, with parts that fail by order."""
    return [
        f"algorithm.plugins=[{parts}/chaos_plugin.py]",
        "algorithm.policy_loss_fn=fragile_ppo",
        "trainer.on_nonfinite=skip",
        "trainer.save_freq=1",
        "trainer.max_restarts=3",
        "trainer.call_timeout_s=20",
        "rollout.max_restarts=1000",
        "rollout.request_timeout_s=10",
        "rollout.num_servers=2",
    ]


def under_chaos(run: ChaosRun, script: list[tuple[Fault, str]], seed: int, note: Note, *, last_steps: int = 0) -> None:
    """Strike as the script says, then end the run, after `last_steps` more if any.  Notes the account."""
    rng, strikes = random.Random(seed), list[Strike]()
    run.wait("the first step, which may come after a cold start", lambda: run.step > 0, 6 * LIMIT_S)
    for fault, stage in script:
        strikes.append(strike(run, fault, stage, rng))
    code = run.end()
    if last_steps:
        run.start(f"trainer.total_training_steps={run.step + last_steps}")
        assert run.driver.wait(LIMIT_S) == 0, run.tail()
    found = account(run.folder)
    note("chaos", json.dumps({"strikes": [asdict(one) for one in strikes], "visits": asdict(found)}))
    assert code == 128 + signal.SIGTERM, run.tail()
    assert not found.twice and not found.missing and not found.outcomes["lost"], found


def small(tmp_path: Path, *more: str) -> list[str]:
    """Of a run without end, on a model that learns nothing."""
    return settings(make_parts(tmp_path), tmp_path, "chaos", *ENDLESS, *more)


@pytest.mark.long
def test_nine_faults_of_every_kind_lose_no_sample(tmp_path: Path, record_property: Note) -> None:
    """Whoever has to wait for both servers needs as many steps as that takes."""
    parts = copy_parts(tmp_path)
    script = schedule([fault for fault in ALL if fault.name in SAMPLE], 1, 0, WITH_CRITIC)
    assert len(script) == len(SAMPLE) == 9
    reward = ["reward.on_error=zero", f"reward.fn={parts}/chaos_reward.py:digits"]
    words = small(tmp_path, *PPO, *survives(parts), *reward)
    with ChaosRun(words, tmp_path / "chaos", parts, num_servers=2) as run:
        under_chaos(run, script, 0, record_property)


@pytest.mark.long
@pytest.mark.timeout(2 * 3600)
def test_machines_that_are_lost_and_servers_that_come_and_go_lose_no_sample(
    tmp_path: Path, record_property: Note
) -> None:
    parts = copy_parts(tmp_path)
    grpo = ["algorithm.adv_estimator=grpo", f"reward.fn={parts}/chaos_reward.py:digits"]
    words = small(tmp_path, *grpo, *survives(parts))
    with ChaosCluster(words, tmp_path / "chaos", parts) as run:
        under_chaos(run, schedule(MACHINES, 3, 2, STAGES), 2, record_property)


def accuracy(folder: Path) -> float:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return float(found["score_after" if "score_after" in found else "accuracy_after"])  # the game's is a mean score


def compare(
    tmp_path: Path, note: Note, faults: list[Fault], words: list[str], of_chaos: list[str], stages: tuple[str, ...]
) -> None:
    """Every fault three times over a run of these words; as many steps undisturbed give the accuracy to reach."""
    parts = copy_parts(tmp_path)
    struck = [*words, *ENDLESS, *survives(parts), *(word.format(parts=parts) for word in of_chaos)]
    with ChaosRun([*struck, "trainer.experiment_name=struck"], Path("runs/struck"), parts, num_servers=2) as run:
        under_chaos(run, schedule(faults, 3, 1, stages), 1, note, last_steps=20)
    calm = [*words, *ENDLESS, f"trainer.total_training_steps={run.step}", "trainer.experiment_name=calm"]
    subprocess.run([sys.executable, "-m", "megarl", "train", *calm], check=True)
    after = {name: accuracy(Path("runs") / name) for name in ("calm", "struck")}
    note("accuracy", json.dumps(after))
    assert after["struck"] > after["calm"] - ACCURACY, after


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_a_long_run_of_ppo_learns_under_every_fault_what_it_learns_without(
    tmp_path: Path, record_property: Note
) -> None:
    of_chaos = ["reward.fn={parts}/chaos_reward.py:exact", "reward.on_error=zero"]
    compare(tmp_path, record_property, ALL, ["recipe=quickstart"], of_chaos, WITH_CRITIC)


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_a_long_run_of_agents_learns_under_every_fault_what_it_learns_without(
    tmp_path: Path, record_property: Note
) -> None:
    """Bad numbers send this one back to its last save.  Pushes, files and rewards have no part in episodes."""
    Path("examples").symlink_to(EXAMPLES)
    words = ["--config", "examples/guessing_game.yaml"]
    of_chaos = ["agent.fn={parts}/chaos_agent.py:episode", "agent.timeout_s=10", "agent.on_error=zero"]
    of_chaos += ["trainer.on_nonfinite=rollback", "trainer.spike_sigma=1000"]
    faults = [*PROCESSES, *REPLIES, *EPISODES, *ROLLBACKS]
    compare(tmp_path, record_property, faults, words, of_chaos, STAGES)
