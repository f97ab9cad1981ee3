"""The script of a test under chaos, and its account: what struck when, and what became of every visit of a prompt."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos_faults import Fault
from chaos_run import ChaosRun
from ring_cases import lines

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


def told(strikes: Sequence[Strike], of: Account) -> str:
    """The account as text, a line for each strike."""
    rows = [f"  step {one.step:4d} {one.taken:16s} {one.fault:28s} {_seconds(one)}" for one in strikes]
    return "\n".join([f"chaos: {len(strikes)} faults survived", *rows, f"  visits: {asdict(of)}"])


def _seconds(one: Strike) -> str:
    noticed = "nothing to notice" if one.noticed_s is None else f"noticed after {one.noticed_s:.1f} s"
    return f"{noticed}, recovered after {one.recovered_s:.1f} s"
