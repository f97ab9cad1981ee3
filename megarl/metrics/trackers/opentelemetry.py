"""The tracker that sends each step as a trace to OpenTelemetry: its stages, the calls to ranks and each rank's work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from megarl.io.traces import Traces
from megarl.metrics.reading.jsonl import TIMELINE, Followed
from megarl.metrics.trackers.tracker import Run, Tracker

if TYPE_CHECKING:
    from opentelemetry.trace import Span

OF_STEP = ("critic/score/mean", "perf/total_num_tokens", "perf/throughput", "actor/grad_norm", "rollout/idle_share")


class OpenTelemetryTracker(Tracker):
    """Reads `timeline.jsonl`, whose times count from the begin of the step.

    Collectors add what they do, with the same ids: groups, episodes, requests to servers (rollout/, agents/).
    """

    def __init__(self, run: Run, traces: Traces, clock: Callable[[], float] = time.time) -> None:
        self._traces, self._clock = traces, clock
        self._lines = Followed(run.run_dir / TIMELINE)
        self._lines.look()  # those of the run that this one continues

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        _, rows = self._lines.look()
        row = next((row for row in rows if row["step"] == step), None)
        if row is None:  # an evaluation
            return
        seconds = metrics["timing_s/step"]
        began = self._clock() - seconds
        of_step = {name: metrics[name] for name in OF_STEP if name in metrics} | {"megarl.step": step}
        root = self._traces.add(f"step {step}", began, seconds, step=step, attributes=of_step)
        outer: list[tuple[float, Span]] = [(0.0, root)]  # stages by their begin
        for name, begin, lasted, depth in sorted(row["stages"], key=lambda stage: (stage[1], stage[3])):
            parent = outer[-1][1] if depth else root
            span = self._traces.add(name, began + begin, lasted, parent=parent)
            if not depth:
                outer.append((begin, span))
        for group, name, begin, ranks in row["calls"]:
            stage = next(span for since, span in reversed(outer) if since <= begin)
            call = self._traces.add(
                name, began + begin, max(ranks.values()), parent=stage, attributes={"megarl.group": group}
            )
            for rank, lasted in ranks.items():
                self._traces.add(f"{name}: rank {rank}", began + begin, lasted, parent=call)

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002
        self._traces.close()
