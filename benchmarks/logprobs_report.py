"""The numbers of bench_logprobs.py as rows, as a table on the terminal, and as a page."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

NAMES = ("tokens", "vocabulary", "way", "columns")
NUMBERS = ("forward s", "backward s", "both s", "spread", "peak MB", "logits MB", "time / plain", "memory / plain")
LEGEND = (
    "Medians over {repeats} passes after a first one (over one where it took 5 s, over the first itself where it took "
    "20 s); spread: the fastest and the slowest of both. `plain`: whole logits, `log_softmax` in float32, autograd. "
    "`torch` and `triton`: megarl's chunks, computed by torch's operations or by Triton's kernels; backwards they make "
    "the logits again. `peak`: the most memory at a time beyond hidden states, weight, labels and (megarl's) "
    "`main_grad`, which Megatron has anyway; the plain way's holds the weight's gradient that autograd makes. On a CPU "
    "it is the sum of living tensors, without what one operation takes inside. `logits`: what all logits take once, in "
    "float32."
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

    @property
    def names(self) -> list[str]:
        """A cell for each of NAMES."""
        return [str(self.num_tokens), str(self.vocab_size), self.way, self.columns]

    def numbers(self, rows: list[Row]) -> list[str]:
        """A cell for each of NUMBERS; `rows` has the plain one of the same size, if there is one."""
        if self.note:
            return [self.note, *[""] * (len(NUMBERS) - 1)]
        plain, compared = self.plain(rows), ["", ""]
        if plain is not None:
            compared = [f"{self.seconds / plain.seconds:.2f}", f"{self.peak_bytes / plain.peak_bytes:.3f}"]
        return [
            *(f"{seconds:.3f}" for seconds in (self.forward, self.backward, self.seconds)),
            f"{self.fastest:.3f}-{self.slowest:.3f}",
            f"{self.peak_bytes / 1e6:.0f}",
            f"{self.num_tokens * self.vocab_size * 4 / 1e6:.0f}",
            *compared,
        ]

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


@dataclass(frozen=True)
class Setting:
    """What was the same for all rows."""

    hardware: str
    versions: str
    day: str
    load: str  # the machine's load average over one minute
    hidden: int
    dtype: str
    repeats: int
    threads: int
    chunk: int  # bytes
    missing: str

    def lines(self) -> list[str]:
        lines = [
            f"hardware: {self.hardware}",
            f"versions: {self.versions}",
            f"hidden size {self.hidden}; hidden states and weight in {self.dtype}; chunks of at most "
            f"{self.chunk / 1e6:.0f} MB of logits; {self.threads} CPU threads",
            f"load average of the machine, which other work may have shared: {self.load}",
        ]
        return [*lines, f"other packages: {self.missing}"] if self.missing else lines


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


def show(console: Console, setting: Setting, rows: list[Row]) -> None:
    """Everything on the terminal."""
    table = Table()
    for name in NAMES:
        table.add_column(name, no_wrap=True)
    for name in NUMBERS:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row.names, *row.numbers(rows))
    console.print(table)
    for line in setting.lines():
        console.print(line, highlight=False, markup=False)


def markdown(setting: Setting, rows: list[Row]) -> str:
    """The page in results/."""
    out = [f"# Log-probs and entropy without the logits, {setting.day}", ""]
    out += [*(f"- {line}" for line in setting.lines()), "", LEGEND.format(repeats=setting.repeats), ""]
    out += [_line((*NAMES, *NUMBERS)), _line(["---"] * (len(NAMES) + len(NUMBERS)))]
    out += [_line([*row.names, *row.numbers(rows)]) for row in rows]
    return "\n".join(out) + "\n"


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"
