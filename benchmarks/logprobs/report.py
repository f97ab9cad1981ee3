"""The numbers of bench_logprobs.py as rows of its page, and its ratios."""

from __future__ import annotations

import re
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any

LEGEND = (
    "Medians over the passes after a first one (over one where it took 5 s, over the first itself where it took 20 s), "
    "in seconds; fastest and slowest of both together. plain: whole logits, log_softmax in float32, autograd. torch "
    "and triton: megarl's chunks, computed by torch's operations or by Triton's kernels; backwards they make the "
    "logits again. peak_bytes: the most memory at a time beyond hidden states, weight, labels and (megarl's) "
    "main_grad, which Megatron has anyway; the plain way's holds the weight's gradient that autograd makes. On a CPU "
    "it is the sum of living tensors, without what one operation takes inside. logits_bytes: what all logits take "
    "once, in float32."
)


@dataclass(frozen=True)
class Row:
    """One case and way."""

    num_tokens: int
    vocab_size: int
    way: str
    columns: str
    forward: float = 0.0  # seconds, medians
    backward: float = 0.0
    fastest: float = 0.0  # of both together
    slowest: float = 0.0
    peak_bytes: int = 0
    note: str = ""

    def with_note(self, note: str) -> Row:
        return replace(self, note=note)

    def with_times(self, times: list[tuple[float, float]], peak_bytes: int) -> Row:
        """`times`: seconds forwards and backwards of each pass."""
        forward, backward = (statistics.median(part) for part in zip(*times, strict=True))
        both = [sum(part) for part in times]
        return replace(
            self, forward=forward, backward=backward, fastest=min(both), slowest=max(both), peak_bytes=peak_bytes
        )

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def cells(self, rows: list[Row]) -> dict[str, Any]:
        """The row of the page; `rows` has the plain one of the same size, if there is one."""
        if self.note:
            return {name: getattr(self, name) for name in ("num_tokens", "vocab_size", "way", "columns", "note")}
        plain = self.plain(rows)
        return asdict(self) | {
            "logits_bytes": self.num_tokens * self.vocab_size * 4,
            "time / plain": self.seconds / plain.seconds if plain else None,
            "memory / plain": self.peak_bytes / plain.peak_bytes if plain else None,
        }

    def plain(self, rows: list[Row]) -> Row | None:
        """The plain way's row of the same size and columns, if it was measured."""
        same = (self.num_tokens, self.vocab_size, self.columns)
        found = (r for r in rows if (r.num_tokens, r.vocab_size, r.columns) == same and r.way == "plain")
        return next((row for row in found if not row.note), None)

    def sentence(self) -> str:
        """What the terminal shows as soon as the row is there."""
        what = f"{self.num_tokens} tokens, vocabulary {self.vocab_size}, {self.way}"
        if self.note:
            return f"{what}: {self.note}"
        return f"{what}: {self.seconds:.3f} s, {self.peak_bytes / 1e6:.0f} MB" if self.seconds else what


def ratios(rows: list[Row]) -> dict[str, float]:
    """The plain way's time and memory over each other way's, medians over the sizes that both have."""
    pairs = [(row, plain) for row in rows if not row.note and row.way != "plain" and (plain := row.plain(rows))]
    said = {}
    for way in dict.fromkeys(row.way for row, _ in pairs):
        mine = [pair for pair in pairs if pair[0].way == way]
        name = "_".join(re.findall(r"[a-z0-9]+", way.lower()))
        said[f"time_plain_over_{name}"] = statistics.median(plain.seconds / row.seconds for row, plain in mine)
        said[f"memory_plain_over_{name}"] = statistics.median(plain.peak_bytes / row.peak_bytes for row, plain in mine)
    return said
