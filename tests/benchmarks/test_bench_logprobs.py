"""The benchmark of log-probs: what it leaves out, how it counts memory, and what it compares."""

from argparse import Namespace

import pytest
import torch
from rich.console import Console

from benchmarks.common.tensor_memory import TensorMemory
from benchmarks.logprobs import bench_logprobs
from benchmarks.logprobs.report import Row, ratios
from benchmarks.logprobs.ways import BOTH, Way, plain

PLAIN = Way("plain", BOTH, plain)


def bench(minutes: float) -> bench_logprobs.Bench:
    options = Namespace(minutes=minutes, quick=True, repeats=1, hidden=4)
    return bench_logprobs.Bench(Console(quiet=True), options, "cpu")


def test_memory_is_that_of_tensors_alive_at_a_time() -> None:
    outside = torch.zeros(1000)
    with TensorMemory() as memory:
        one = outside + 1  # 4000 bytes
        view = one[:500]
        two = view * 2  # 2000 more
        del one, view
        three = two + outside[:500]  # 2000 more, less the 4000
        outside.mul_(2)
    assert (memory.peak_bytes, memory.now_bytes, memory.largest_elements) == (6000, 4000, 1000)
    assert three.numel() == 500


def test_a_case_that_does_not_fit_or_for_which_there_is_no_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = bench(minutes=1.0)
    monkeypatch.setattr(mine, "_free_bytes", lambda: 20_000_000_000)
    assert mine._obstacle(PLAIN, 10**9) == "not run: it would take 24 GB and 20 GB are free"
    assert mine._obstacle(PLAIN, 10**8) == ""
    mine.seconds_per_logit["plain"] = 1e-6
    assert mine._obstacle(PLAIN, 10**6) == ""
    assert mine._obstacle(PLAIN, 10**8) == "not run: there was no time for it"


def test_rows_are_compared_with_the_plain_one_of_their_size() -> None:
    rows = [
        Row(10, 20, "plain", "log_probs").with_times([(1.0, 2.0), (1.0, 4.0), (1.5, 3.0)], 2_000_000),
        Row(10, 20, "torch", "log_probs").with_times([(1.0, 1.0)], 500_000),
        Row(99, 20, "torch", "log_probs").with_times([(1.0, 1.0)], 500_000),
        Row(99, 20, "plain", "log_probs").with_note("not run: it is large"),
    ]
    first, torch_way, alone, left_out = (row.cells(rows) for row in rows)
    keys = ("forward", "backward", "fastest", "slowest", "peak_bytes", "logits_bytes", "time / plain", "memory / plain")
    assert [first[key] for key in keys] == [1.0, 3.0, 3.0, 5.0, 2_000_000, 800, 1.0, 1.0]
    assert [torch_way[key] for key in keys] == [1.0, 1.0, 2.0, 2.0, 500_000, 800, 0.5, 0.25]
    assert (alone["time / plain"], alone["memory / plain"]) == (None, None)
    size = {"num_tokens": 99, "vocab_size": 20}
    assert left_out == size | {"way": "plain", "columns": "log_probs", "note": "not run: it is large"}
    assert ratios(rows) == {"time_plain_over_torch": 2.0, "memory_plain_over_torch": 4.0}
