"""The numbers of bench_push.py as rows of its page."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.push.plan_cost import MESSAGE_BYTES, SERVERS, TRAINER, PlanCost

PHASES = ("join", "pause", "gather", "convert", "send", "load", "verify", "resume")
CARRY = ("gather", "convert", "send", "load")  # what moves the bytes; the rest is asking and checking
TRAFFIC = ("received", "transfers", "requests")
NAMES = ("model", "trainer", "servers", "transport")


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
    # Medians of the bytes that the rank with most of them got from the others, by how many transfers, and of the
    # requests to servers.
    traffic: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, size: str, trainer: str, servers: str, transport: str, useful: int, pushes: list[dict[str, Any]], note: str
    ) -> Row:
        """`pushes`: what ranks.py says of each: seconds, error, and the fields of a PushReport."""
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
        traffic = {name: round(statistics.median(p[name] for p in later)) for name in TRAFFIC}
        begun = (first["seconds"], first["timings"]["join"])
        return cls(size, trainer, servers, transport, useful, *begun, phases, seconds, note, traffic)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def names(self) -> list[str]:
        """A cell for each of NAMES."""
        return [self.size, self.trainer, self.servers, self.transport]

    def of_copy(self, copy: float) -> float:
        return self.useful / self.median / copy

    def cells(self, copy: float) -> dict[str, Any]:
        """The row of the page; `copy`: bytes a second of a copy in memory."""
        names = dict(zip(NAMES, self.names, strict=True))
        if not self.seconds:
            return {**names, "note": self.note}
        carried = sum(self.phases[name] for name in CARRY)
        return {
            **names,
            "useful_bytes": self.useful,
            "first_s": self.first,
            "first_join_s": self.first_join,
            "push_s": self.median,
            "fastest": min(self.seconds),
            "slowest": max(self.seconds),
            "of_copy": self.of_copy(copy),
            "moved_bytes_per_s": self.useful / carried if carried else None,
            **self.traffic,
            **self.phases,
            "other": self.median - sum(self.phases.values()),
            "note": self.note,
        }

    def sentence(self) -> str:
        """What the terminal shows as soon as the row is there."""
        what = f"{self.size}, {self.trainer} -> {self.servers}, {self.transport}: "
        if not self.seconds:
            return what + self.note
        return (
            what + f"{self.median:.3f} s, {rate(self.useful / self.median)}" + (f"; {self.note}" if self.note else "")
        )


LEGEND = (
    "Seconds; medians over the pushes after the first, whose own time and join stand apart; fastest and slowest of "
    "them; other: what the phases leave of a push. useful_bytes: of the receivers' own shards, each byte once for each "
    "rank that needs it. push_s: from the call on all ranks to verified servers that write again; of_copy: "
    "useful_bytes / push_s, as a share of the speed of a copy in memory; moved_bytes_per_s: useful_bytes / (gather + "
    "convert + send + load), without the questions and checks around them; received and transfers: the bytes that the "
    "rank of the trainer which gets most has from other processes, and in how many transfers; requests: to servers. "
    "The first sharded or shared push also sends whole tensors, to compare. All weights change before each push, and "
    "each push is verified."
)


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
