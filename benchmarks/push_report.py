"""The numbers of bench_push.py as rows, as a table on the terminal, and as a page."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from push_plan import MESSAGE_BYTES, SERVERS, TRAINER, PlanCost
from rich.console import Console
from rich.table import Table

from megarl.weights.mapping.names import some_names

PHASES = ("join", "pause", "gather", "convert", "send", "load", "verify", "resume")
CARRY = ("gather", "convert", "send", "load")  # what moves the bytes; the rest is asking and checking
NAMES = ("model", "trainer", "servers", "transport")
RATES = ("useful", "first", "first join", "push", "spread", "useful/s", "of copy", "moved/s")


@dataclass(frozen=True)
class Row:
    """One case and transport.  Seconds are medians over all pushes but the first, which also joins groups and plans."""

    size: str
    trainer: str
    servers: str
    transport: str
    useful: int  # bytes that must reach the servers
    first: float = 0.0  # seconds of the first push
    first_join: float = 0.0  # of them, until all groups stood
    phases: dict[str, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # of each push after the first
    note: str = ""

    @classmethod
    def of(
        cls, size: str, trainer: str, servers: str, transport: str, useful: int, pushes: list[dict[str, Any]], note: str
    ) -> Row:
        """`pushes`: what push_ranks told of each: seconds, error, and the fields of a PushReport."""
        taken = [p for p in pushes if not p["error"] and not p["failed"]]
        note = note or next((p["error"] or "; ".join(p["failed"].values()) for p in pushes if p not in taken), "")
        if note or not taken:
            return cls(size, trainer, servers, transport, useful, note=note or "nothing was pushed")
        used = sorted({used for p in taken for used in p["transports"].values()})
        reasons = sorted({reason for p in taken for told in p["fallbacks"].values() for reason in told})
        if used != [transport]:
            note = f"went {' and '.join(used)}" + (f" ({'; '.join(reasons)})" if reasons else "")
        first, later = taken[0], taken[1:]
        phases = {name: statistics.median(p["timings"].get(name, 0.0) for p in later) for name in PHASES}
        seconds = [p["seconds"] for p in later]
        return cls(
            size, trainer, servers, transport, useful, first["seconds"], first["timings"]["join"], phases, seconds, note
        )

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def names(self) -> list[str]:
        """A cell for each of NAMES."""
        return [self.size, self.trainer, self.servers, self.transport]

    def rates(self, copy: float) -> list[str]:
        """A cell for each of RATES; `copy`: bytes a second of a copy in memory."""
        carried = sum(self.phases[name] for name in CARRY)
        return [
            megabytes(self.useful),
            *(f"{seconds:.3f}" for seconds in (self.first, self.first_join, self.median)),
            f"{min(self.seconds):.3f}-{max(self.seconds):.3f}",
            rate(self.useful / self.median),
            f"{self.of_copy(copy):.2%}",
            rate(self.useful / carried) if carried else "",
        ]

    def of_copy(self, copy: float) -> float:
        return self.useful / self.median / copy

    def said(self, copy: float) -> dict[str, Any]:
        """The same as numbers."""
        names = dict(zip(NAMES, self.names, strict=True))
        if not self.seconds:
            return {**names, "note": self.note}
        push = {"push_s": self.median, "fastest": min(self.seconds), "slowest": max(self.seconds)}
        first = {"useful_bytes": self.useful, "first_s": self.first, "first_join_s": self.first_join}
        return {**names, **first, **push, "of_copy": self.of_copy(copy), **self.phases, "note": self.note}

    def seconds_of_phases(self) -> list[str]:
        """A cell for each of PHASES, and what they leave of a push."""
        other = self.median - sum(self.phases.values())
        return [*(f"{self.phases[name]:.3f}" for name in PHASES), f"{other:.3f}"]

    def sentence(self) -> str:
        """What the terminal shows as soon as the row is there."""
        what = f"{self.size}, {self.trainer} -> {self.servers}, {self.transport}: "
        if not self.seconds:
            return what + self.note
        return (
            what + f"{self.median:.3f} s, {rate(self.useful / self.median)}" + (f"; {self.note}" if self.note else "")
        )


@dataclass(frozen=True)
class Setting:
    """What was the same for all rows."""

    hardware: str
    versions: str
    day: str
    load: str  # the machine's load average over one minute
    num_ranks: int
    dtype: str
    repeats: int
    bucket_bytes: int
    copy: float  # bytes a second
    hashing: float
    plan: str

    def lines(self) -> list[str]:
        return [
            f"hardware: {self.hardware}",
            f"versions: {self.versions}",
            f"{self.num_ranks} trainer ranks; weights in {self.dtype} on both sides; buckets and messages of at most "
            f"{megabytes(self.bucket_bytes)}",
            f"one large copy in memory: {rate(self.copy)}; sha256 on one core: {rate(self.hashing)}",
            f"load average of the machine, which other work may have shared: {self.load}",
            self.plan,
        ]


LEGEND = (
    "Seconds; medians over {repeats} pushes after the first, whose own time and join stand apart; spread: the fastest "
    "and the slowest of them; other: what the phases leave of a push. `useful`: bytes of the receivers' own shards, "
    "each byte once for each rank that needs it. `push`: from the call on all ranks to verified servers that write "
    "again; `useful/s` = useful / push, `of copy` its share of the speed of a copy in memory; `moved/s` = useful / "
    "(gather + convert + send + load), without the questions and checks around them. The first sharded push also sends "
    "whole tensors, to compare. All weights change before each push, and each push is verified."
)


def show(console: Console, setting: Setting, rows: list[Row]) -> None:
    """Everything on the terminal."""
    measured = [row for row in rows if row.seconds]
    rates = partial(Row.rates, copy=setting.copy)
    for columns, cells in ((RATES, rates), ((*PHASES, "other"), Row.seconds_of_phases)):
        table = Table()
        for column in (*NAMES, *columns):
            table.add_column(column, justify="left" if column in NAMES else "right", no_wrap=True)
        for row in measured:
            table.add_row(*row.names, *cells(row))
        console.print(table)
    for line in (*notes(rows), *setting.lines()):
        console.print(line, highlight=False, markup=False)


def markdown(setting: Setting, rows: list[Row]) -> str:
    """The page in results/."""
    measured = [row for row in rows if row.seconds]
    out = [f"# Pushing weights, {setting.day}", "", *(f"- {line}" for line in setting.lines()), ""]
    columns = (*NAMES, *RATES, *PHASES, "other")
    out += [LEGEND.format(repeats=setting.repeats), "", _line(columns), _line(["---"] * len(columns))]
    out += [_line([*row.names, *row.rates(setting.copy), *row.seconds_of_phases()]) for row in measured]
    if said := notes(rows):
        out += ["", "Notes:", "", *(f"- {note}" for note in said)]
    return "\n".join(out) + "\n"


def notes(rows: list[Row]) -> list[str]:
    """What cells cannot say; the same of several rows is said once."""
    said: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            said.setdefault(row.note, []).append(" ".join(row.names))
    return [f"{some_names(names, 3)}: {note}" for note, names in said.items()]


def plan_words(cost: PlanCost) -> str:
    """One line about the plan for a model of a trillion parameters."""
    trainer = " ".join(f"{key}={value}" for key, value in TRAINER.items())
    servers = " ".join(f"{key}={value}" for key, value in SERVERS.items())
    senders, receivers = TRAINER["world_size"], SERVERS["tp"] * SERVERS["num_replicas"]
    return (
        f"a rank's own part of the plan for {cost.parameters / 1e12:.2f}T parameters, from {senders} ranks ({trainer}) "
        f"to {receivers} ({servers}), messages of {megabytes(MESSAGE_BYTES)}: at most {cost.cpu_seconds:.1f} CPU "
        f"seconds and {megabytes(cost.extra_bytes)} more memory among {cost.ranks_tried} ranks tried"
    )


def rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"
