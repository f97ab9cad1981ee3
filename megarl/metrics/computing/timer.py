"""Measures the time of each stage of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timer:
    """Times the stages of consecutive steps.

    Example:
        timer = Timer(on_stage=trackers.stage)
        timer.start()
        with timer("gen"):
            batch = prefetcher.take()
        metrics |= timer.finish(num_tokens=batch.num_tokens)      # timing_s/gen, timing_s/step, perf/...

    A nested stage has its own time but counts only once in perf/unaccounted.  Times of the same name are added.
    """

    def __init__(self, on_stage: Callable[[str], None] | None = None, clock: Callable[[], float] = time.perf_counter):
        self._on_stage, self._clock = on_stage, clock
        self.start()

    def start(self) -> None:
        """Start a new step."""
        self.began = self._clock()
        self.stages: list[tuple[str, float, float, int]] = []  # ended ones: name, begin since `began`, seconds, depth
        self._seconds: dict[str, float] = {}
        self._accounted = 0.0
        self._depth = 0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a stage, also one that ends with an exception."""
        if self._on_stage:
            self._on_stage(name)
        begin, self._depth = self._clock(), self._depth + 1
        try:
            yield
        finally:
            seconds, self._depth = self._clock() - begin, self._depth - 1
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            self.stages.append((name, begin - self.began, seconds, self._depth))
            if self._depth == 0:
                self._accounted += seconds

    def split(self, stage: str, tail: str, seconds: float) -> float:
        """The last `seconds` of the stage that has just ended belong to another one; returns how many those were."""
        name, begin, whole, depth = self.stages.pop()
        assert name == stage, f"{name} was the last stage, not {stage}"
        seconds = min(seconds, whole)
        self.stages += [(stage, begin, whole - seconds, depth), (tail, begin + whole - seconds, seconds, depth)]
        self._seconds[stage] -= seconds
        self._seconds[tail] = self._seconds.get(tail, 0.0) + seconds
        return seconds

    def finish(self, *, num_tokens: int, num_devices: int = 1) -> dict[str, float]:
        """End the step and start the next.  num_tokens: tokens of the prompts and responses that were trained on.

        Returns: timing_s/<stage> and timing_s/step in seconds; perf/total_num_tokens; perf/time_per_step in seconds;
            perf/throughput in tokens per second and device, perf/throughput_total of all devices; perf/unaccounted, the
            share of the step outside all stages.
        """
        assert self._depth == 0, "finish() inside a stage"
        step = self._clock() - self.began
        out = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        out |= {
            "timing_s/step": step,
            "perf/total_num_tokens": float(num_tokens),
            "perf/time_per_step": step,
            "perf/throughput": num_tokens / (step * num_devices) if step > 0 else 0.0,
            "perf/throughput_total": num_tokens / step if step > 0 else 0.0,
            "perf/unaccounted": max(step - self._accounted, 0.0) / step if step > 0 else 0.0,
        }
        self.start()
        return out
