"""Profiles the calls of a rank: a trace of torch's profiler, ranges for Nsight Systems, the history of GPU memory."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

MEMORY_EVENTS = 200_000  # allocations and frees that a snapshot remembers, the last ones


class RankProfiler:
    """Between `start` and `stop`.  Ranges have the names of `torch.profiler.record_function` around the calls.

    tool "torch": stop writes FILE.trace.json.gz, for https://ui.perfetto.dev.  tool "nvtx": every operation is an NVTX
    range, and Nsight Systems records what lies between (`nsys profile --capture-range=cudaProfilerApi`).  `memory`:
    stop writes FILE.memory.pickle, for https://pytorch.org/memory_viz, which nothing here reads.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._trace: profile | None = None
        self._ranges = ExitStack()
        self._memory = False

    def start(self, tool: str, *, memory: bool) -> None:
        on_gpu = self._device.type == "cuda"
        assert on_gpu or (tool == "torch" and not memory), "the driver refuses what only a GPU has"
        if memory:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            self._memory = True
        if tool == "nvtx":
            torch.cuda.profiler.start()
            self._ranges.enter_context(torch.autograd.profiler.emit_nvtx())
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._trace = profile(activities=activities, record_shapes=True)
        self._trace.start()

    def stop(self, file: Path) -> list[str]:
        """The names of the files that it has written, which begin with `file`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        written = []
        if self._trace is None:
            self._ranges.close()
            torch.cuda.profiler.stop()
        else:
            self._trace.stop()
            file.parent.mkdir(parents=True, exist_ok=True)
            written.append(f"{file}.trace.json.gz")
            self._trace.export_chrome_trace(written[-1])
            self._trace = None
        if self._memory:
            file.parent.mkdir(parents=True, exist_ok=True)
            written.append(f"{file}.memory.pickle")
            torch.cuda.memory._dump_snapshot(written[-1])
            torch.cuda.memory._record_memory_history(enabled=None)
            self._memory = False
        return written
