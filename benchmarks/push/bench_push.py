"""How long it takes to put a trainer's weights into its servers, and on what the time goes.

    python benchmarks/push/bench_push.py            all cases for this machine, at most 8 minutes
    python benchmarks/push/bench_push.py --quick    one tiny case for each engine

Each case pushes a model from ranks in one layout into servers in another, every transport that there is, several times;
the weights change before each push and every push is verified.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common import page
from benchmarks.common.machine import copy_bandwidth, hardware, hash_bandwidth, slug, version_in
from benchmarks.push.matrix import (
    SIZES,
    TRANSPORTS,
    Case,
    ServerSet,
    by_servers,
    cpu_cases,
    cpu_cases_of_8,
    gpu_cases,
    quick_cases,
    useful_bytes,
)
from benchmarks.push.orders import Build, PushAll
from benchmarks.push.plan_cost import plan_cost
from benchmarks.push.report import LEGEND, Row, plan_words, rate
from megarl.arch.layout import Layout
from megarl.group import Group, GroupSettings, RankError
from megarl.servers.launch import EngineLaunch
from megarl.servers.sglang_environment import sglang_python
from megarl.servers.supervisor import ServerDied, Servers
from megarl.weights.push.settings import PushSettings

BUCKET_BYTES = 64 << 20
TIMEOUT_S = 120.0


class Bench:
    """Ranks that stay, servers that come and go, and the rows so far."""

    def __init__(self, console: Console, work: Path, options: argparse.Namespace) -> None:
        self.console, self.work, self.options = console, work, options
        self.on_gpu = options.device == "cuda"
        self.num_ranks = max(1, torch.cuda.device_count() // 2) if self.on_gpu else options.ranks
        self.dtype = "bfloat16" if self.on_gpu else "float32"
        self.deadline = time.monotonic() + 60 * options.minutes
        self.rows: list[Row] = []
        # Servers on GPUs of their own; else they share the only one with the rank.
        self.apart = self.on_gpu and torch.cuda.device_count() > 1

    def cases(self) -> list[Case]:
        on_cpu = cpu_cases() if self.num_ranks == 2 else cpu_cases_of_8()
        for_machine = gpu_cases(self.num_ranks) if self.on_gpu else on_cpu
        found = quick_cases(self.num_ranks) if self.options.quick else for_machine
        return [case for case in found if case.servers.engine in self.options.engines]

    def run(self) -> None:
        """Measure every case; one that fails, or that there is no time for, says so in its row."""
        with ExitStack() as stack:
            os.environ["PYTHONPATH"] = os.pathsep.join([str(page.ROOT), os.environ.get("PYTHONPATH", "")])
            device = "cuda" if self.on_gpu else "cpu"
            settings = GroupSettings(device=device, worker="benchmarks.push.ranks")
            group = Group("ranks", self.num_ranks, Layout(), settings, log_dir=self.work / "ranks")
            stack.enter_context(group)
            with self.console.status("starting ranks"):
                group.start()
            for servers, cases in by_servers(self.cases()):
                self._run_servers(group, servers, cases)

    def _run_servers(self, group: Group, servers: ServerSet, cases: list[Case]) -> None:
        """All cases of one set of servers, started once."""
        if reason := self._obstacle(servers):
            self._give_up(cases, reason)
            return
        folder, token = self._model(servers.size), secrets.token_hex(16)
        launches = [self._launch(servers, folder, index) for index in range(servers.replicas)]
        logs = self.work / f"{slug(str(servers))}_{servers.size}"
        try:
            with Servers(launches, token, logs) as processes:
                with self.console.status(f"starting {servers}, {servers.size}"):
                    processes.start()
                version = 1
                for case in cases:
                    for transport in self.options.transports:
                        self._measure(group, case, transport, folder, list(processes.urls), token, version)
                        version += 1 + self.options.repeats
        except (ServerDied, RankError, ValueError) as error:
            self._give_up(cases, str(error).splitlines()[0])

    def _measure(
        self, group: Group, case: Case, transport: str, folder: Path, urls: list[str], token: str, version: int
    ) -> None:
        if note := self._why_not(transport):
            self._add(self._row(case, transport, note=note))
            return
        with self.console.status(
            f"{case.servers}, {case.servers.size}, {case.trainer_words(self.num_ranks)}, {transport}"
        ):
            group.call(Build(str(folder), case.trainer, self.dtype))
            settings = PushSettings(
                tuple(urls),
                token,
                dtype=self.dtype,
                bucket_bytes=BUCKET_BYTES,
                timeout_s=TIMEOUT_S,
                transport=transport,
                gpus=self._seats(case.servers, urls),
            )
            order = PushAll(settings, first_version=version, pushes=1 + self.options.repeats)
            pushes: list[dict[str, Any]] = group.call_leader(order).result["pushes"]
        self._add(self._row(case, transport, useful_bytes(folder, case.servers, self.dtype), pushes))

    def _row(self, case: Case, transport: str, useful: int = 0, pushes: Any = (), note: str = "") -> Row:
        servers = case.servers
        return Row.of(
            servers.size, case.trainer_words(self.num_ranks), str(servers), transport, useful, list(pushes), note
        )

    def _give_up(self, cases: list[Case], reason: str) -> None:
        known = [row.names for row in self.rows]
        for row in (self._row(case, transport, note=reason) for case in cases for transport in self.options.transports):
            if row.names not in known:
                self._add(row)

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self.console.print(row.sentence(), highlight=False, markup=False)

    def _why_not(self, transport: str) -> str:
        """Why this push is not run; "" if it is."""
        if time.monotonic() > self.deadline:
            return "not run: the time was up"
        shares_gpu = self.on_gpu and not self.apart and transport not in ("shared", "mapped")
        return "not run: NCCL joins no two processes of one GPU" if shares_gpu else ""

    def _obstacle(self, servers: ServerSet) -> str:
        if time.monotonic() > self.deadline:
            return "not run: the time was up"
        return _sglang()[1] if servers.engine == "sglang" else ""

    def _launch(self, servers: ServerSet, folder: Path, index: int) -> EngineLaunch:
        """With several GPUs the servers stand on those that do not train."""
        return EngineLaunch(
            servers.engine,
            str(folder),
            dtype=self.dtype,
            tensor_parallel_size=servers.tp,
            max_running_requests=8,
            index=index,
            device="cuda" if self.on_gpu else "cpu",
            first_gpu=self._first_gpu(servers, index),
            memory_fraction=0.4 if self.on_gpu else None,
        )

    def _first_gpu(self, servers: ServerSet, index: int) -> int | None:
        return self.num_ranks * self.apart + index * servers.tp if self.on_gpu else None

    def _seats(self, servers: ServerSet, urls: list[str]) -> dict[str, Any] | None:
        """The GPUs of ranks and servers, as a push wants to know them."""
        if not self.on_gpu:
            return None
        firsts = [self._first_gpu(servers, index) or 0 for index in range(len(urls))]
        of_servers = {
            url: [f"0/{first + rank}" for rank in range(servers.tp)] for url, first in zip(urls, firsts, strict=True)
        }
        return {"trainer": [f"0/{rank}" for rank in range(self.num_ranks)], "servers": of_servers}

    def _model(self, size: str) -> Path:
        folder = self.work / "models" / size
        if not folder.exists():
            with self.console.status(f"making a model of {size} parameters"):
                SIZES[size].write(folder, self.dtype)
        return folder


def _sglang() -> tuple[Path | None, str]:
    """The interpreter of SGLang's environment, or why there is none."""
    try:
        return sglang_python(None), ""
    except ValueError as error:
        return None, f"no environment for SGLang ({error})"


def measure(options: argparse.Namespace) -> page.Result:
    """Run all cases."""
    options.repeats = (1 if options.quick else 5) if options.repeats is None else options.repeats
    if options.repeats < 1:
        raise ValueError(f"--repeats {options.repeats}: expected at least 1")
    console, device = page.terminal(), options.device
    with console.status("measuring plain copies"):
        copy, hashing = copy_bandwidth(device), hash_bandwidth()
    console.print(f"{hardware(device)}; a copy: {rate(copy)}; sha256 on one core: {rate(hashing)}", highlight=False)
    with tempfile.TemporaryDirectory(prefix="bench_push_") as work:
        bench = Bench(console, Path(work), options)
        bench.run()
    with console.status("planning for a trillion parameters"):
        plan = plan_words(plan_cost(1 if options.quick else 2))
    if not any(row.seconds for row in bench.rows):
        raise ValueError(f"nothing was pushed; {'; '.join(dict.fromkeys(row.note for row in bench.rows))}")
    configuration = {
        "trainer ranks": bench.num_ranks,
        "repeats": options.repeats,
        "dtype": bench.dtype,
        "bucket_bytes": BUCKET_BYTES,
        "copy, GB/s": copy / 1e9,
        "sha256 on one core, GB/s": hashing / 1e9,
    }
    if "sglang" in options.engines and (python := _sglang()[0]):
        configuration["SGLang"] = version_in(python, "sglang")
    rows = [row.cells(copy) for row in bench.rows]
    return page.Result("push", device, configuration, rows, ratios(bench.rows, copy), [LEGEND, plan], "Pushing weights")


def ratios(rows: list[Row], copy: float) -> dict[str, float]:
    """For each engine and transport the median, over its cases, of its share of the speed of a copy in memory."""
    shares: dict[str, list[float]] = {}
    for row in rows:
        if row.seconds:
            shares.setdefault(f"{row.servers.split()[0]}_{row.transport}_of_copy", []).append(row.of_copy(copy))
    return {name: statistics.median(each) for name, each in shares.items()}


def parser() -> argparse.ArgumentParser:
    made = page.arguments(__doc__)
    made.add_argument("--engines", nargs="+", choices=("hf", "sglang"), default=["hf", "sglang"])
    made.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    made.add_argument("--ranks", type=int, choices=(2, 8), default=2, help="without GPUs (default 2)")
    made.add_argument("--repeats", type=int, help="pushes after the first one (default 5; 1 with --quick)")
    made.add_argument("--minutes", type=float, default=6.5, help="no case begins later than this (default 6.5)")
    return made


if __name__ == "__main__":
    raise SystemExit(page.run(measure, parser()))
