"""What is known of a run, which each look brings up to date, and the page of it as tables of the terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megarl.io.terminal import one_line
from megarl.metrics.computing.evaluation import ACC, CORE
from megarl.metrics.reading.jsonl import ADVICE, METRICS, NO_METRICS, SAMPLES, TIMELINE, Followed, Series
from megarl.metrics.reading.pace import STEP_S, Pace, clock_text, is_step
from megarl.metrics.reading.status import STOPS, read_status
from megarl.metrics.trackers.console import COLUMNS
from megarl.trainer.run_lock import started_at

KEPT = 128  # last lines of files of which only the end is shown
BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 40  # of a curve
TEXT = 100  # characters of a prompt or an answer
SENTENCE = 1000  # of advice, or of why a run has ended
CURVES = (("val score", "val/score", ".3f"), *COLUMNS, ("s/step", STEP_S, ".2f"))
DEVICES = (  # of the trainer; a CPU has none of the first two
    ("MFU of the actor", "perf/mfu/actor", ".1%"),
    ("GPU memory, GB", "perf/max_memory_reserved_gb", ".1f"),
    ("host memory, GB", "perf/cpu_memory_used_gb", ".1f"),
)
SERVERS = (
    ("hold the weights", "push/servers", ".0f"),
    ("idle", "rollout/servers_idle_share", ".0%"),
    ("running", "servers/running", ".0f"),
    ("queued", "servers/waiting", ".0f"),
    ("KV cache", "servers/kv_share", ".0%"),
    ("in flight", "rollout/in_flight", ".0f"),
    ("waiting", "rollout/finished_waiting", ".0f"),
    ("trainer waited", "rollout/idle_share", ".0%"),
)
FAULTS = (  # counts since the start of the run, which are 0 in a run without faults
    ("servers died", "push/servers_died"),
    ("slower transports", "push/fallbacks"),
    ("slow servers", "rollout/slow_servers"),
    ("collector restarts", "rollout/collector_restarts"),
    ("saves failed", "checkpoint/failed"),
    ("rollbacks", "trainer/rollbacks"),
)
FAULTS_OF_A_STEP = (  # counts of one step each
    ("failed requests", "rollout/failed_requests"),
    ("groups lost", "rollout/lost"),
    ("unscored", "reward/unscored"),
    ("steps skipped", "trainer/skipped_steps"),
)
_MAX_STAGES = 6
_MAX_RANKS = 4


class Run:
    """What is known of a run; `look` brings it up to date."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.series: Series = {}
        self.last_step: dict[str, Any] = {}  # the metrics of the last step; those of an evaluation are another row
        self.pace = Pace()
        self.samples: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.advice: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.timeline: deque[dict[str, Any]] = deque(maxlen=1)
        self.status: dict[str, Any] = {}
        self._metrics = Followed(folder / METRICS)
        self._ends = [
            (Followed(folder / SAMPLES), self.samples),
            (Followed(folder / ADVICE), self.advice),
            (Followed(folder / TIMELINE), self.timeline),
        ]

    def look(self) -> None:
        """Read what is new.  `status` stays empty until the run has begun its first stage."""
        self.status = read_status(self.folder) or {}
        anew, rows = self._metrics.look()
        if anew:
            self.series.clear()
            self.last_step, self.pace = {}, Pace()
        started = started_at(self.folder) if rows else 0.0
        for row in rows:
            self._take(row, started)
        for file, kept in self._ends:
            anew, rows = file.look()
            if anew:
                kept.clear()
            kept.extend(rows)

    def _take(self, row: dict[str, Any], started: float) -> None:
        """One row of the metrics.  What was before the last start does not tell how fast the run is now."""
        for name, value in row.items():
            if name not in NO_METRICS and value is not None:
                steps, values = self.series.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(value)
        if is_step(row):
            self.last_step = row
            if row["time"] >= started:
                self.pace.note(row["step"], row["time"], row[STEP_S])

    def last(self, name: str) -> float | None:
        """The last value of a metric."""
        values = self.series.get(name, ([], []))[1]
        return values[-1] if values else None


def page(run: Run, *, is_running: bool, now: float | None = None) -> RenderableType:
    """`is_running`: a process trains in the folder.  `now`: seconds since 1970."""
    parts: list[RenderableType] = [_head(run, is_running=is_running, now=time.time() if now is None else now)]
    numbers = (_numbers(run, "trainer", DEVICES), _numbers(run, "servers", SERVERS))
    parts += [table for table in (_curves(run), _stages(run), *numbers, _samples(run)) if table.row_count]
    parts += [
        Text(f"advice at step {row['step']}: {plain(row['advice'], SENTENCE)}", "yellow")
        for row in list(run.advice)[-3:]
    ]
    if faults := list(_faults(run)):
        parts.append(Text(f"faults: {', '.join(faults)}", "red"))
    return Group(*parts)


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """At most `width` blocks, each the mean of equally many values; from the least of them to the largest."""
    width = min(width, len(values))
    parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    points = [mean(part) for part in parts]
    low, high = min(points, default=0.0), max(points, default=0.0)
    span = high - low
    return "".join(BLOCKS[round((p - low) / span * (len(BLOCKS) - 1)) if span else 0] for p in points)


def plain(text: str, limit: int = TEXT) -> str:
    """One line, shortened in its middle."""
    line = one_line(text)
    return line if len(line) <= limit else f"{line[: limit // 2]} … {line[-limit // 2 :]}"


def _head(run: Run, *, is_running: bool, now: float) -> Text:
    status = run.status
    head = Text(f"{plain(run.folder.resolve().name)}  ", "bold")
    if not status:  # it makes data, or tries rewards
        began = ("has just started", "cyan") if is_running else ("ended before its first stage", "red")
        return head.append(*began)
    step, total = status["step"], status["total_steps"]
    if is_running:
        count = f" {status['done']}/{status['total']}" if "total" in status else ""
        seconds = clock_text(max(now - status["since"], 0.0))
        stage = f"{plain(status['stage'])}{count} for {seconds}"
        head.append(
            f"step {min(step + 1, total)}/{total}  {stage}  eta {clock_text(run.pace.seconds_left(total))}", "cyan"
        )
        return head
    end = status.get("end")
    if end is not None and end["error"] is None:
        head.append(f"has finished its {total} steps", "green")
    elif end is not None and end["error"] in STOPS:
        head.append(f"was stopped after step {step}/{total}: {plain(end['why'], SENTENCE)}", "yellow")
    else:
        why = f"{end['error']}: {plain(end['why'], SENTENCE)}" if end else "killed"
        head.append(f"ended after step {step}/{total}: {why}; see `megarl doctor --run {run.folder}`", "red")
    return head


def _curves(run: Run) -> Table:
    table = _table("", "curve", "now", "least", "most")
    for label, name, style in (*_accuracies(run), *CURVES):
        values = run.series.get(name, ([], []))[1]
        if values:
            numbers = [f"{number:{style}}" for number in (values[-1], min(values), max(values))]
            table.add_row(label, sparkline(values), *numbers)
    return table


def _accuracies(run: Run) -> list[tuple[str, str, str]]:
    """The curves of the shares of right answers, which rewards tell beside their score."""
    accuracies = {
        name: name.split("/") for name in run.series if name.startswith(f"{CORE}/") and f"/{ACC}/mean@" in name
    }
    return [
        ("accuracy" if len(accuracies) == 1 else f"accuracy, {plain('/'.join(parts[1:-2]))}", name, ".3f")
        for name, parts in accuracies.items()
    ]


def _stages(run: Run) -> Table:
    """Where the time of the last step went, and which ranks worked longest in it."""
    table = _table("stage", "", "s", "slowest ranks, s")
    names = [n for n in run.last_step if n.startswith("timing_s/") and n.count("/") == 1 and n != STEP_S]
    seconds = {name.partition("/")[2]: run.last_step[name] for name in names}
    slowest = list(_slowest(run))
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:_MAX_STAGES]
    for at, (name, value) in enumerate(longest):
        bar = "█" * round(20 * min(value / run.last_step[STEP_S], 1.0))
        table.add_row(plain(name), bar, f"{value:.2f}", slowest[at] if at < len(slowest) else "")
    return table


def _slowest(run: Run) -> Iterator[str]:
    """Ranks by the seconds that they worked in the calls of the last step."""
    worked: dict[str, float] = {}
    for row in run.timeline:
        for group, _, _, seconds in row["calls"]:
            for rank, value in seconds.items():
                worked[f"{group} rank {rank}"] = worked.get(f"{group} rank {rank}", 0.0) + value
    for name, value in sorted(worked.items(), key=lambda item: -item[1])[:_MAX_RANKS]:
        yield f"{plain(name)}: {value:.2f}"


def _numbers(run: Run, title: str, which: Sequence[tuple[str, str, str]]) -> Table:
    """One row of those that the run has; no row without any."""
    known = [(label, f"{value:{style}}") for label, name, style in which if (value := run.last(name)) is not None]
    table = _table(title, *(label for label, _ in known))
    if known:
        table.add_row("", *(value for _, value in known))
    return table


def _samples(run: Run) -> Table:
    table = _table("step", "reward", "prompt", "answer")
    by_prompt: dict[str, dict[str, Any]] = {}  # the last answer to each, the latest at the end
    for row in run.samples:
        by_prompt.pop(row["uid"], None)
        by_prompt[row["uid"]] = row
    for row in list(by_prompt.values())[-3:]:
        prompt, answer = plain(row["prompt"], TEXT // 2), plain(row["completion"])
        table.add_row(str(row["step"]), f"{row['reward']:.3g}", Text(prompt), Text(answer))
    return table


def _faults(run: Run) -> Iterator[str]:
    for label, name in FAULTS:
        if value := run.last(name):
            yield f"{label} {value:.0f}"
    for label, name in FAULTS_OF_A_STEP:
        steps, values = run.series.get(name, ([], []))
        if whole := sum(values):
            last = max(step for step, value in zip(steps, values, strict=True) if value)
            yield f"{label} {whole:.0f} (last at step {last})"


def _table(*titles: str) -> Table:
    return Table(*titles, box=None, padding=(0, 2, 0, 0), header_style="dim")
