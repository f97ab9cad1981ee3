"""What log-probs and entropy cost without the logits in memory, beside the plain way: time and peak memory.

    python benchmarks/logprobs/bench_logprobs.py            1k to 16k tokens, vocabularies of 32k and 152k, 6 minutes
    python benchmarks/logprobs/bench_logprobs.py --quick    sizes that take seconds

Each case makes hidden states and a weight, and takes the columns and all gradients.  Cases that would not fit into this
machine's memory are left out, and the page says so.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common import page
from benchmarks.common.tensor_memory import peak_bytes
from benchmarks.logprobs.report import LEGEND, Row, ratios
from benchmarks.logprobs.ways import Way, inputs, missing, ways
from megarl.arch.layout import Layout
from megarl.mcore.logprobs import fused
from megarl.mcore.setup import backend_of, make_groups

SIZES = [(tokens, vocab) for vocab in (32_768, 151_936) for tokens in (1024, 4096, 16_384)]
QUICK = [(64, 1000), (256, 1000)]
SHARE_OF_MEMORY = 0.8
COPIES = 6.0  # [T, V] float32 that the plain way makes, until a measured case says it better


class Bench:
    """The rows so far, and what they teach about the next ones."""

    def __init__(self, console: Console, options: argparse.Namespace, device: str) -> None:
        self.console, self.options, self.device = console, options, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.deadline = time.monotonic() + 60 * options.minutes
        self.rows: list[Row] = []
        self.seconds_per_logit: dict[str, float] = {}
        self.plain_bytes_per_logit = COPIES * 4

    def run(self) -> None:
        for num_tokens, vocab_size in QUICK if self.options.quick else SIZES:
            tensors = inputs(num_tokens, vocab_size, self.options.hidden, self.device, self.dtype)
            for way in ways(self.device):
                self._add(self._measure(way, tensors, num_tokens, vocab_size))

    def _measure(self, way: Way, tensors: list[Tensor], num_tokens: int, vocab_size: int) -> Row:
        row = Row(num_tokens, vocab_size, way.name, " ".join(way.names))
        if note := self._obstacle(way, num_tokens * vocab_size):
            return row.with_note(note)
        hidden, weight, labels = (tensor.detach() for tensor in tensors)
        hidden.requires_grad_()
        weight.requires_grad_()
        if way.is_ours:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
            weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]

        times: list[tuple[float, float]] = []

        def step() -> None:
            begun = self._now()
            loss = way.loss(hidden, weight, labels)
            between = self._now()
            loss.backward()
            times.append((between - begun, self._now() - between))
            hidden.grad = weight.grad = None

        with (
            self.console.status(row.sentence()),
            mock.patch.object(fused, "gpu_kernels", way.kernels or fused.gpu_kernels),
        ):
            peak = peak_bytes(step, self.device)  # also the warm-up
            first = sum(times[0])
            for _ in range(self.options.repeats if first < 5 else 1 if first < 20 else 0):
                step()
        row = row.with_times(times[1:] or times, peak)
        self.seconds_per_logit[way.name] = max(first, row.seconds) / (num_tokens * vocab_size)
        if way.is_plain:
            self.plain_bytes_per_logit = max(peak - weight.numel() * 4, 0) / (num_tokens * vocab_size)
        return row

    def _obstacle(self, way: Way, num_logits: int) -> str:
        """Why a case is not run."""
        left = self.deadline - time.monotonic()
        if 2.2 * num_logits * self.seconds_per_logit.get(way.name, 0.0) > left:
            return "not run: there was no time for it"
        if way.is_plain:
            wanted, free = num_logits * self.plain_bytes_per_logit, self._free_bytes()
            if wanted > SHARE_OF_MEMORY * free:
                return f"not run: it would take {wanted / 1e9:.0f} GB and {free / 1e9:.0f} GB are free"
        return ""

    def _free_bytes(self) -> int:
        if self.device == "cpu":
            return psutil.virtual_memory().available
        torch.cuda.empty_cache()  # what torch keeps for later counts as taken
        return torch.cuda.mem_get_info()[0]

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self.console.print(row.sentence(), highlight=False, markup=False)


def measure(options: argparse.Namespace) -> page.Result:
    """Run all cases."""
    device = options.device
    _complete(options)
    console = page.terminal()
    backend = backend_of(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    make_groups(Layout())
    bench = Bench(console, options, device)
    bench.run()
    dist.destroy_process_group()
    configuration = {
        "hidden": options.hidden,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "repeats": options.repeats,
        "threads": torch.get_num_threads(),
        "chunk, MB of logits": fused.CHUNK_ELEMENTS * bench.dtype.itemsize / 1e6,
    }
    notes = [LEGEND] + [f"other packages: {absent}" for absent in [missing(device)] if absent]
    rows = [row.cells(bench.rows) for row in bench.rows]
    title = "Log-probs and entropy without the logits"
    return page.Result("logprobs", device, configuration, rows, ratios(bench.rows), notes, title)


def _complete(options: argparse.Namespace) -> None:
    """What is not given.  ValueError for what cannot be."""
    if options.hidden is None:
        options.hidden = 32 if options.quick else 4096 if options.device == "cuda" else 256
    if options.repeats is None:
        options.repeats = 1 if options.quick else 5
    if min(options.repeats, options.hidden) < 1:
        raise ValueError(f"--repeats {options.repeats}, --hidden {options.hidden}: expected at least 1")


def parser() -> argparse.ArgumentParser:
    made = page.arguments(__doc__)
    made.add_argument("--hidden", type=int, help="hidden size (default 4096 on a GPU, 256 on a CPU, 32 with --quick)")
    made.add_argument("--repeats", type=int, help="timed passes after the first (default 5; 1 with --quick)")
    made.add_argument("--minutes", type=float, default=6.0, help="cases that would end later are left out (default 6)")
    return made


if __name__ == "__main__":
    raise SystemExit(page.run(measure, parser()))
