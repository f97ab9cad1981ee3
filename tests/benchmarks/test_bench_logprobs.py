"""The benchmark of log-probs: what it leaves out, how it counts memory, and what it compares."""

from argparse import Namespace

import bench_logprobs
import pytest
import torch
from logprobs_report import Row, Setting, markdown, ratios
from logprobs_ways import BOTH, Way, plain
from rich.console import Console
from tensor_memory import TensorMemory

SETTING = Setting("A CPU", "Python 3", "2026-01-02", "0.1 before, 0.2 after", 32, "float32", 2, 1, 64, "none")
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
    page = markdown(SETTING, rows)
    assert "| 10 | 20 | plain | log_probs | 1.000 | 3.000 | 4.000 | 3.000-5.000 | 2 | 0 | 1.00 | 1.000 |" in page
    assert "| 10 | 20 | torch | log_probs | 1.000 | 1.000 | 2.000 | 2.000-2.000 | 0 | 0 | 0.50 | 0.250 |" in page
    assert "| 99 | 20 | torch | log_probs | 1.000 | 1.000 | 2.000 | 2.000-2.000 | 0 | 0 |  |  |" in page
    assert "| 99 | 20 | plain | log_probs | not run: it is large |" in page
    assert ratios(rows) == {"time_plain_over_torch": 2.0, "memory_plain_over_torch": 4.0}
