"""The driver's view of a conversion's ranks: runs jobs step by step and shows their progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megarl.convert.folders import ModelFolder, bytes_under
from megarl.group import Group
from megarl.weights.mapping.names import num_bytes

STEP_BYTES = 256 << 20  # a rank reports progress after this many bytes


@dataclass
class Ranks:
    """The model on its ranks, and their jobs with progress display."""

    group: Group
    console: Console
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)  # HF name -> shape, type

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(*size) for size in self.tensors.values())

    def build(self, hf_folder: Path, role: str, dtype: str) -> None:
        self.group.start()
        found = self.group.call_leader("build", {"folder": str(hf_folder), "role": role, "dtype": dtype}).result
        self.tensors = {
            name: (tuple(shape), getattr(torch, kind.removeprefix("torch.")))
            for name, (shape, kind) in found["tensors"].items()
        }

    def load(self, folder: ModelFolder, title: str) -> None:
        if folder.format == "hf":
            self.carry_out("read_hf", title, folder=str(folder.path))
        elif folder.format == "torch_dist":
            self.carry_out("read_torch_dist", title, folder=str(folder.path))
        else:
            self.carry_out("read_megatron", title, folder=str(folder.path), base=str(folder.hf_folder))

    def write(self, folder: ModelFolder, source: ModelFolder) -> None:
        if folder.format == "hf":
            self.carry_out("write_hf", "write", folder=str(folder.path), source_folder=str(source.hf_folder))
        else:
            self.carry_out("write_megatron", "write", watch=folder.path, folder=str(folder.path))

    def digests(self, folder: ModelFolder, title: str) -> dict[str, str]:
        """HF name -> digest of each tensor in a folder, read from disk again."""
        if folder.format == "hf":
            return self.carry_out("digest_hf", title, folder=str(folder.path))
        self.load(folder, f"{title}: reading")
        return self.carry_out("digest", title)

    def carry_out(self, job: str, title: str, *, watch: Path | None = None, **arguments: Any) -> dict[str, str]:
        """Run a job to its end; returns its digests.  `watch`: a folder whose size shows the progress."""
        begun, done = time.monotonic(), 0
        digests: dict[str, str] = {}
        with self._bar(title) as advance, _watched(watch, advance):
            self.group.call("begin", {"job": job, **arguments})
            finished = False
            while not finished:
                answer = self.group.call_leader("go_on", {"num_bytes": STEP_BYTES}).result
                finished, digests = answer["finished"], digests | answer["digests"]
                done += answer["num_bytes"]
                advance(done)
        self.console.print(
            f"{title}: {len(self.tensors)} tensors, {decimal(done)}, {time.monotonic() - begun:.1f} s", highlight=False
        )
        return digests

    @contextmanager
    def _bar(self, title: str) -> Iterator[Any]:
        """A progress bar, shown only on a terminal and while the job runs."""
        columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            task = bar.add_task(title, total=self.num_bytes)
            yield lambda done: bar.update(task, completed=min(done, self.num_bytes))


@contextmanager
def _watched(folder: Path | None, advance: Callable[[int], None]) -> Iterator[None]:
    """Inside this context, report a folder's size from a separate thread."""
    stop = threading.Event()

    def look() -> None:
        while folder is not None and not stop.wait(0.2):
            advance(bytes_under(folder))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
