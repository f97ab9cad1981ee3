"""The benchmark of pushes: its arithmetic, what it says of what failed, and a whole small run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import bench_push
import pytest
import torch
from machine import copy_bandwidth, hardware, slug, versions
from push_matrix import SIZES, TRANSPORTS, Case, ServerSet, by_servers, cpu_cases, gpu_cases, quick_cases, useful_bytes
from push_plan import PlanCost, plan_cost
from push_report import Row, Setting, markdown, notes, plan_words
from rich.console import Console
from safetensors import safe_open

ROOT = Path(__file__).parents[2]
URL = "http://127.0.0.1:1"
SETTING = Setting("A CPU", "Python 3", "2026-01-02", "0.1 before, 0.2 after", 2, "float32", 2, 64, 10e9, 1e9, "a plan")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SIZES["1M"].write(tmp_path_factory.mktemp("models") / "1M", "float32")


def told(seconds: float, transport: str = "gathered", **fields: Any) -> dict[str, Any]:
    """What a rank says of one push."""
    timings = {
        "join": 0.5 if seconds == 9.0 else 0.0,
        "gather": seconds / 2,
        "send": seconds / 4,
        "verify": seconds / 4,
    }
    return {
        "seconds": seconds,
        "error": "",
        "failed": {},
        "fallbacks": {},
        "transports": {URL: transport},
        "timings": timings,
    } | fields


def row(*pushes: dict[str, Any], transport: str = "gathered", useful: int = 10**9, note: str = "") -> Row:
    return Row.of("1M", "tp2 pp1 dp1", "hf tp1 x1", transport, useful, list(pushes), note)


def sizes(folder: Path) -> dict[str, int]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118


def test_a_cpu_server_needs_every_byte_and_so_does_its_replica(model: Path) -> None:
    whole = sum(sizes(model).values())
    assert useful_bytes(model, ServerSet("hf", "1M"), "float32") == whole
    assert useful_bytes(model, ServerSet("hf", "1M", replicas=2), "bfloat16") == whole


def test_ranks_of_a_server_share_what_is_cut_and_each_need_the_rest(model: Path) -> None:
    """1M has two key-value heads: four ranks hold each of them twice."""
    whole = sizes(model)
    repeated = sum(n for name, n in whole.items() if "norm" in name)
    kv = sum(n for name, n in whole.items() if "k_proj" in name or "v_proj" in name)
    assert useful_bytes(model, ServerSet("sglang", "1M", tp=2), "float32") == sum(whole.values()) + repeated
    assert useful_bytes(model, ServerSet("sglang", "1M", tp=4), "float32") == sum(whole.values()) + 3 * repeated + kv


def test_numbers_are_medians_of_the_pushes_after_the_first() -> None:
    found = row(told(9.0), told(4.0), told(1.0), told(2.0))
    assert (found.first, found.first_join, found.seconds, found.median) == (9.0, 0.5, [4.0, 1.0, 2.0], 2.0)
    of_push = ["1000.0 MB", "9.000", "0.500", "2.000", "1.000-4.000", "0.50 GB/s"]
    assert found.rates(copy=10e9) == [*of_push, "5.00%", "0.67 GB/s"]
    assert found.seconds_of_phases() == [
        *("0.000", "0.000", "1.000", "0.000", "0.500", "0.000", "0.500", "0.000"),
        "0.000",
    ]
    assert found.note == ""


def test_the_ratios_are_shares_of_a_copys_speed() -> None:
    rows = [
        row(told(9.0), told(1.0)),
        row(told(9.0), told(4.0)),
        row(note="no"),
        row(told(9.0, "shared"), told(2.0, "shared"), transport="shared"),
    ]
    assert bench_push.ratios(rows, copy=10e9) == {"hf_gathered_of_copy": 0.0625, "hf_shared_of_copy": 0.05}
    assert rows[0].said(10e9)["push_s"] == 1.0 and rows[2].said(10e9)["note"] == "no"


def test_a_way_that_gave_way_to_another_is_said() -> None:
    found = row(*(told(1.0, fallbacks={URL: ["sharded: it needs a loader"]}) for _ in range(2)), transport="sharded")
    assert found.seconds == [1.0]
    assert found.note == "went gathered (sharded: it needs a loader)"


def test_a_case_that_failed_once_has_no_numbers() -> None:
    found = row(told(1.0), told(1.0, transports={}, failed={URL: "it does not answer"}))
    assert (found.seconds, found.note) == ([], "it does not answer")
    assert row(told(1.0), told(0.1, error="the push failed")).note == "the push failed"


def test_a_note_of_several_rows_is_said_once() -> None:
    absent = [row(transport=transport, note="no environment") for transport in ("gathered", "shared")]
    assert notes(absent) == ["1M tp2 pp1 dp1 hf tp1 x1 gathered, 1M tp2 pp1 dp1 hf tp1 x1 shared: no environment"]


def test_the_page_has_numbers_setting_and_notes() -> None:
    page = markdown(SETTING, [row(told(9.0), told(2.0)), row(transport="sharded", note="not run: the time was up")])
    for words in ("hardware: A CPU", "0.1 before, 0.2 after", "| 1M | tp2 pp1 dp1 |", "a plan", "- 1M tp2", "not run:"):
        assert words in page
    assert "| 0.50 GB/s | 5.00% |" in page


def test_servers_are_started_once_for_all_cases_that_they_can_serve() -> None:
    for cases in (cpu_cases(), gpu_cases(1), gpu_cases(4), quick_cases(1), quick_cases(2)):
        grouped = list(by_servers(cases))
        assert len({servers for servers, _ in grouped}) == len(grouped)
        assert sorted(map(repr, cases)) == sorted(repr(case) for _, some in grouped for case in some)
        assert all(case.servers.size in SIZES for case in cases)


def on_gpus(count: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bench_push.Bench:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    options = Namespace(device="cuda", minutes=9.0, quick=False, engines=["hf"], transports=TRANSPORTS, repeats=1)
    return bench_push.Bench(Console(quiet=True), folder, options)


def test_with_one_gpu_a_server_shares_it_and_gets_its_weights_by_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, servers = on_gpus(1, tmp_path, monkeypatch), ServerSet("hf", "1.5B")
    assert [case.servers for case in bench.cases()] == [servers] and bench.num_ranks == 1
    launch = bench._launch(servers, tmp_path, 0)
    assert (launch.device, launch.first_gpu, launch.dtype) == ("cuda", 0, "bfloat16")
    assert bench._seats(servers, [URL]) == {"trainer": ["0/0"], "servers": {URL: ["0/0"]}}
    blocked = "not run: NCCL joins no two processes of one GPU"
    assert [bench._why_not(transport) for transport in TRANSPORTS] == [blocked, "", blocked]


def test_with_eight_gpus_servers_stand_behind_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, servers = on_gpus(8, tmp_path, monkeypatch), ServerSet("sglang", "7B", tp=2, replicas=2)
    assert bench.num_ranks == 4
    assert [bench._launch(servers, tmp_path, index).first_gpu for index in range(2)] == [4, 6]
    assert bench._seats(servers, [URL, "b"])["servers"] == {URL: ["0/4", "0/5"], "b": ["0/6", "0/7"]}
    assert [bench._why_not(transport) for transport in TRANSPORTS] == ["", "", ""]


def test_what_there_was_no_time_for_is_a_row_too(tmp_path: Path) -> None:
    options = Namespace(
        device="cpu", minutes=0.0, quick=False, engines=["hf"], transports=["gathered", "shared"], repeats=1
    )
    bench = bench_push.Bench(Console(quiet=True), tmp_path, options)
    case = Case(ServerSet("hf", "1M"), {"tp": 2})
    bench._run_servers(None, case.servers, [case])  # type: ignore[arg-type]  # no rank is asked
    assert [(r.transport, r.note) for r in bench.rows] == [
        ("gathered", "not run: the time was up"),
        ("shared", "not run: the time was up"),
    ]


def test_a_missing_environment_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_SGLANG_PYTHON", str(tmp_path / "python"))
    options = Namespace(device="cpu", minutes=1.0, quick=True, engines=["sglang"], transports=["gathered"], repeats=1)
    bench = bench_push.Bench(Console(quiet=True), tmp_path, options)
    for servers, cases in by_servers(bench.cases()):
        bench._run_servers(None, servers, cases)  # type: ignore[arg-type]
    assert [row.note.startswith("no environment for SGLang (MEGARL_SGLANG_PYTHON=") for row in bench.rows] == [True]


def test_the_machine_is_described_without_its_name() -> None:
    assert re.search(r", \d+ cores, \d+ GiB$", hardware())
    assert os.uname().nodename not in hardware()
    assert slug("AMD EPYC, 2 cores, 24 GiB") == "amd_epyc_2_cores_24_gib"
    assert re.match(r"Python 3\.\d+\.\d+, torch ", versions())


def test_a_copy_has_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copy_bandwidth.__globals__["COPY_BYTES"], "cpu", 1 << 20)
    assert copy_bandwidth("cpu", repeats=1) > 0


def test_the_plan_of_a_trillion_parameters_is_told_in_a_line() -> None:
    words = plan_words(PlanCost(1_093_313_387_520, 4, 4.5, 84_000_000, 1421))
    assert "1.09T parameters, from 1024 ranks" in words
    assert "at most 4.5 CPU seconds and 84.0 MB more memory among 4 ranks tried" in words


@pytest.mark.long
def test_a_rank_plans_a_trillion_parameters_in_little_memory() -> None:
    cost = plan_cost(1)
    assert cost.parameters > 10**12
    assert cost.extra_bytes < 256 << 20
    assert cost.messages > 100


@pytest.mark.long
@pytest.mark.dist
def test_a_whole_run_writes_its_page(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/bench_push.py", "--quick", "--engines", "hf", "--json", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    transports = ("gathered", "shared", "sharded")
    assert list(said)[-3:] == [f"hf_{transport}_of_copy" for transport in transports]
    assert [row["transport"] for row in said["rows"]] == list(transports) and said["rows"][0]["push_s"] > 0
    page = next(tmp_path.glob("push_quick_*.md"))
    text = page.read_text()
    for transport in ("gathered", "shared", "sharded"):
        assert f"| 1M | tp2 pp1 dp1 | hf tp1 x1 | {transport} |" in text
    assert "Notes:" not in text, text
    assert str(page) in done.stdout.replace("\n", "")
