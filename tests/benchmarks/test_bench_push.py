"""The benchmark of pushes: its arithmetic, and what it says of what failed."""

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from benchmarks.push import bench_push
from benchmarks.push.matrix import SIZES, ServerSet, by_servers, cpu_cases, gpu_cases, quick_cases, useful_bytes
from benchmarks.push.report import PHASES, Row

URL = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SIZES["1M"].write(tmp_path_factory.mktemp("models") / "1M", "float32")


def told(seconds: float, transport: str = "gathered", **fields: Any) -> dict[str, Any]:
    """What a rank says of one push."""
    phases = {"join": 0.5 * (seconds == 9.0), "gather": seconds / 2, "send": seconds / 4, "verify": seconds / 4}
    said = {"seconds": seconds, "error": "", "failed": {}, "fallbacks": {}, "timings": phases}
    said |= {"received": 10 * seconds, "transfers": 3, "requests": 7}
    return said | {"transports": {URL: transport}} | fields


def row(*pushes: dict[str, Any], transport: str = "gathered", useful: int = 10**9, note: str = "") -> Row:
    return Row.of("1M", "tp2 pp1 dp1", "hf tp1 x1", transport, useful, list(pushes), note)


def sizes(folder: Path) -> dict[str, int]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118


def test_ranks_of_a_server_share_what_is_cut_and_each_need_the_rest(model: Path) -> None:
    """1M has two key-value heads: four ranks hold each of them twice."""
    whole = sizes(model)
    assert useful_bytes(model, ServerSet("hf", "1M"), "float32") == sum(whole.values()), "on a CPU every byte"
    assert useful_bytes(model, ServerSet("hf", "1M", replicas=2), "bfloat16") == sum(whole.values()), "half, twice"
    repeated = sum(n for name, n in whole.items() if "norm" in name)
    kv = sum(n for name, n in whole.items() if "k_proj" in name or "v_proj" in name)
    assert useful_bytes(model, ServerSet("sglang", "1M", tp=2), "float32") == sum(whole.values()) + repeated
    assert useful_bytes(model, ServerSet("sglang", "1M", tp=4), "float32") == sum(whole.values()) + 3 * repeated + kv


def test_numbers_are_medians_of_the_pushes_after_the_first() -> None:
    found = row(told(9.0), told(4.0), told(1.0), told(2.0))
    assert (found.first, found.first_join, found.seconds, found.median) == (9.0, 0.5, [4.0, 1.0, 2.0], 2.0)
    cells = found.cells(copy=10e9)
    assert (cells["first_s"], cells["first_join_s"], cells["push_s"]) == (9.0, 0.5, 2.0)
    assert (cells["fastest"], cells["slowest"], cells["of_copy"]) == (1.0, 4.0, 0.05)
    assert cells["moved_bytes_per_s"] == pytest.approx(10**9 / 1.5)
    assert [cells[name] for name in (*PHASES, "other")] == [0, 0, 1, 0, 0.5, 0, 0.5, 0, 0]
    assert (cells["received"], cells["transfers"], cells["requests"]) == (20, 3, 7)
    assert found.note == ""


def test_the_ratios_are_shares_of_a_copys_speed() -> None:
    rows = [row(told(9.0), told(1.0)), row(told(9.0), told(4.0)), row(note="no")]
    rows += [row(told(9.0, "shared"), told(2.0, "shared"), transport="shared")]
    assert bench_push.ratios(rows, copy=10e9) == {"hf_gathered_of_copy": 0.0625, "hf_shared_of_copy": 0.05}
    assert rows[0].cells(10e9)["push_s"] == 1.0 and rows[2].cells(10e9)["note"] == "no"


def test_what_failed_or_went_another_way_is_said() -> None:
    other = row(*(told(1.0, fallbacks={URL: ["sharded: it needs a loader"]}) for _ in range(2)), transport="sharded")
    assert (other.seconds, other.note) == ([1.0], "went gathered (sharded: it needs a loader)")
    failed = row(told(1.0), told(1.0, transports={}, failed={URL: "it does not answer"}))
    assert (failed.seconds, failed.note) == ([], "it does not answer")
    assert row(told(1.0), told(0.1, error="the push failed")).note == "the push failed"


def test_servers_are_started_once_for_all_cases_that_they_can_serve() -> None:
    for cases in (cpu_cases(), gpu_cases(1), gpu_cases(4), quick_cases(1), quick_cases(2)):
        grouped = list(by_servers(cases))
        assert len({servers for servers, _ in grouped}) == len(grouped)
        assert sorted(map(repr, cases)) == sorted(repr(case) for _, some in grouped for case in some)
        assert all(case.servers.size in SIZES for case in cases)
