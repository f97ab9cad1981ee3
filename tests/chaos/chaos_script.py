"""The script of a test under chaos, and its account: what struck when, and what became of every visit of a prompt."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos_faults import STAGES, Fault
from chaos_run import ChaosRun
from ring_cases import lines

OUTCOMES = ("trained", "filtered", "lost", "skipped")


@dataclass(frozen=True)
class Strike:
    """`noticed_s`: until the run said something about it, None if it never did; `recovered_s`: until a later step.

    Both count from the strike on, and with the start of a driver that it ended.
    """

    fault: str
    stage: str
    step: int
    noticed_s: float | None
    recovered_s: float


def schedule(faults: Sequence[Fault], times: int, seed: int) -> list[tuple[Fault, str]]:
    """Every fault so many times, in random order; the stages of a step take turns."""
    rng = random.Random(seed)
    order = [fault for fault in faults for _ in range(times)]
    rng.shuffle(order)
    return [(fault, STAGES[(number + seed) % len(STAGES)]) for number, fault in enumerate(order)]


def strike(run: ChaosRun, fault: Fault, stage: str, rng: random.Random) -> Strike:
    """Strike in this stage of a step, and wait until the run has trained a step that began after it."""
    before = run.step
    run.wait(f"a step after {before}", lambda: run.step > before)
    run.wait(stage, lambda: run.stage == stage)
    step, said, began = run.step, run.log.stat().st_size, time.monotonic()
    fault.strike(run, rng)
    noticed: list[float] = []

    def is_over() -> bool:
        if not noticed and _says_something(run.log, said):
            noticed.append(time.monotonic() - began)
        obeyed = fault.order is None or not run.ordered(fault.order)
        return obeyed and run.step > step + 1 and run.last.get("push/servers") == run.num_servers

    run.wait(f"the end of: {fault.name}, {stage} of step {step + 1}", is_over)
    return Strike(fault.name, stage, step + 1, noticed[0] if noticed else None, time.monotonic() - began)


def _says_something(log: Path, offset: int) -> bool:
    """Whether the console has a line since then that is no step of the progress."""
    with log.open("rb") as file:
        file.seek(offset)
        found = file.read().decode(errors="replace").splitlines()
    return any(line.strip() and not line.startswith(("step ", "{", "}")) for line in found)


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
    rows = [f"  step {one.step:4d} {one.stage:16s} {one.fault:28s} {_seconds(one)}" for one in strikes]
    return "\n".join([f"chaos: {len(strikes)} faults survived", *rows, f"  visits: {asdict(of)}"])


def _seconds(one: Strike) -> str:
    noticed = "said nothing" if one.noticed_s is None else f"noticed after {one.noticed_s:.1f} s"
    return f"{noticed}, recovered after {one.recovered_s:.1f} s"
