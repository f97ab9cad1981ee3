"""Why a run ended, from its folder alone: status.json, logs/failure.txt, the logs that it names, and the metrics."""

from __future__ import annotations

import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from megarl.commands.doctor.causes import Source, known_cause
from megarl.metrics.reading.jsonl import ADVICE, METRICS, ROLLBACKS, Series
from megarl.metrics.reading.status import FILE, STOPS
from megarl.metrics.report.folder import RunFolder
from megarl.processes.lifetime import MemoryEnd
from megarl.trainer.checkpoint.checkpoint import folders_under, step_of
from megarl.trainer.run_lock import has_owner, started_at

RUNNING, FINISHED, STOPPED, FAILED, KILLED = "running", "finished", "stopped", "failed", "killed"
FAILURE = Path("logs/failure.txt")
TAIL_BYTES = 2**16  # of a log that is searched
MAX_LOGS = 64
FULL_BYTES = 2**20  # of free disk: with less a run cannot write its log
_LOG = re.compile(r"[\w./@+-]+\.log")
_SLOW = 5.0  # times the median of a stage's seconds, after which it is said to be late
_LATE_S = 60.0  # but not before this
_RECENT = 20  # steps with which the last one is compared


class Explanation(NamedTuple):
    state: str  # running | finished | stopped | failed | killed
    cause: str  # one sentence
    next: str  # the next thing to do
    evidence: tuple[str, ...] = ()  # "FILE:LINE: text", and what the metrics show


def explain(folder: Path) -> Explanation:
    """What became of a run.  Raises ValueError, one sentence, for a folder that is none of a run."""
    run = RunFolder(folder)
    is_running = has_owner(folder)
    if not is_running and not run.status and not (folder / FAILURE).is_file():
        raise ValueError(f"{folder}: no status.json there; expected the folder of a run, such as runs/quickstart")
    end = run.status.get("end")
    signs = tuple(_signs(run))
    if is_running:
        return _running(run)
    if run.summary:  # only a finished run has one
        done = f"it finished its {run.status['total_steps']} steps"
        return Explanation(FINISHED, done, f"{folder}/report.html shows what it did", signs)
    if end is None and run.status:
        return _killed(run)._replace(evidence=signs)
    if end is not None and end["error"] in STOPS:
        reason = end["why"] or "Ctrl-C ended it"
        return Explanation(STOPPED, reason, _again(folder), signs)
    return _failed(run, signs)


def _running(run: RunFolder) -> Explanation:
    status = run.status
    if not status:
        return Explanation(RUNNING, "it has just started", f"`megarl watch {run.path}` shows how it goes on")
    seconds = max(time.time() - status["since"], 0.0)
    usual = run.series.get(f"timing_s/{status['stage']}", ([], []))[1]
    where = f"step {status['step'] + 1} of {status['total_steps']}, {status['stage']} for {seconds:.0f} s"
    if usual and seconds > max(_LATE_S, _SLOW * median(usual)):
        late = f"it runs, but it is late: {where}, which took {median(usual):.1f} s in other steps"
        what = "wait for the limit of the call (trainer.call_timeout_s), after which the run names the rank that hangs"
        return Explanation(RUNNING, late, what)
    return Explanation(RUNNING, f"it runs: {where}", f"`megarl watch {run.path}` shows how it goes on")


def _killed(run: RunFolder) -> Explanation:
    """The driver ended without a word of its own."""
    status = run.status
    where = f"after step {status['step']} of {status['total_steps']}, in the stage {status['stage']}"
    if shutil.disk_usage(run.path).free < FULL_BYTES:
        free = f"`df -h {run.path}` shows what is free; {_again(run.path)}"
        return Explanation(KILLED, f"the disk is full, and the driver ended {where}, without a word", free)
    cause = f"the driver (pid {status['pid']} on {status['host']}) was killed {where}"
    if status["host"] == socket.gethostname():
        who, kills = MemoryEnd().count()
        cause += f"; the kernel has killed {kills or 'no'} processes of {who} because memory ran out"
    look = (
        "`dmesg -T | grep -i 'killed process'`, or the scheduler's record (sacct, kubectl describe pod), says by whom"
    )
    return Explanation(KILLED, cause, f"{look}; {_again(run.path)}")


def _failed(run: RunFolder, signs: tuple[str, ...]) -> Explanation:
    end = run.status.get("end") or {"error": "", "why": ""}
    sources = list(_sources(run.path, f"{end['error']}: {end['why']}"))
    is_mistake = end["error"] == "ValueError"  # of the user, in a sentence that says what is expected: no log says more
    known = known_cause(sources[:1] if is_mistake else sources, str(run.path))
    if known is not None:
        more = () if known.evidence.startswith(sources[0].name) else (f"{sources[0].name}: {_first_line(end['why'])}",)
        return Explanation(FAILED, known.says, f"{known.next}; {_again(run.path)}", (known.evidence, *more, *signs))
    why = _first_line(end["why"]) or "its reason is not known here"
    if is_mistake:
        return Explanation(FAILED, why, f"correct what the sentence names; {_again(run.path)}", signs)
    return Explanation(FAILED, why, f"{run.path / FAILURE} has the whole error; {_again(run.path)}", signs)


def _sources(folder: Path, sentence: str) -> Iterator[Source]:
    """The sentence with which the run ended, its failure.txt, and the logs that these name, or all."""
    yield Source(FILE, sentence)
    started = started_at(folder)
    failure = _tail(folder / FAILURE) if _is_of(folder / FAILURE, started) else ""
    if failure:
        yield Source(str(FAILURE), failure)
    logs = sorted(path for path in (folder / "logs").rglob("*.log") if _is_of(path, started))
    named = {Path(name).name for name in _LOG.findall(f"{sentence}\n{failure}")}
    chosen = [path for path in logs if path.name in named] or logs
    for path in chosen[:MAX_LOGS]:
        yield Source(str(path.relative_to(folder)), _tail(path))


def _is_of(file: Path, started: float) -> bool:
    return file.is_file() and file.stat().st_mtime >= started


def _tail(file: Path) -> str:
    """The end of a log, with empty lines in place of those before, so that line numbers are those of the file."""
    data = file.read_bytes()
    skipped = data[:-TAIL_BYTES].count(b"\n") if len(data) > TAIL_BYTES else 0
    return "\n" * skipped + data[-TAIL_BYTES:].decode(errors="replace")


def _again(folder: Path) -> str:
    saves = folders_under(folder / "checkpoints")
    return f"the same command starts it again, from {f'step {step_of(saves[-1])}' if saves else 'its beginning'}"


def _signs(run: RunFolder) -> Iterator[str]:
    """What the metrics show of the last steps."""
    series = run.series
    for name in ("actor/grad_norm", "critic/grad_norm"):
        if (last := _last(series, name)) and len(before := series[name][1][:-1]) >= 5:
            usual = median(before[-_RECENT:])
            if usual > 0 and last[1] > 10 * usual:
                yield f"{METRICS}: {name} is {last[1]:.3g} at step {last[0]}, and was {usual:.3g} before"
    if (last := _last(series, "actor/entropy")) and last[1] < 0.1 * series["actor/entropy"][1][0]:
        yield f"{METRICS}: actor/entropy has fallen from {series['actor/entropy'][1][0]:.3g} to {last[1]:.3g}"
    if (last := _last(series, "rollout_corr/log_prob_gap_mean")) and last[1] > 0.05:
        yield f"{METRICS}: rollout_corr/log_prob_gap_mean is {last[1]:.3g}: trainer and servers compute differently"
    for name in ("push/servers_died", "push/fallbacks", "checkpoint/failed", "rollout/collector_restarts"):
        if (last := _last(series, name)) and last[1] > 0:
            yield f"{METRICS}: {name} is {last[1]:.0f}"
    if rollbacks := list(run.lines(ROLLBACKS)):
        yield f"{ROLLBACKS}: {len(rollbacks)} rollbacks"
    for row in list(run.lines(ADVICE))[-2:]:
        yield f"{ADVICE}: at step {row['step']}: {row['advice']}"


def _last(series: Series, name: str) -> tuple[int, float] | None:
    steps, values = series.get(name, ([], []))
    return (steps[-1], values[-1]) if steps else None


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
