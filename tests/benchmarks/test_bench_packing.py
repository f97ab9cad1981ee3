"""The benchmark of packing: the ways it compares, its measures by hand, and a small run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common import page
from benchmarks.packing import bench_packing, ways
from benchmarks.packing.bench_packing import ANSWERS, SHARED, WORK, cost_of, measure_shared, measures, ratios, saved
from benchmarks.packing.ways import WAYS, Task, largest_differencing
from megarl.samples.batch import Batch

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def task(lengths: list[int], num_ranks: int = 2, max_tokens: int = 50) -> Task:
    return Task(lengths, [n * (12 + n) for n in lengths], num_ranks, max_tokens, hidden_size=1)


@given(lengths=LENGTHS, num_ranks=st.integers(1, 4), slack=st.integers(0, 60))
def test_every_way_packs_every_sequence_within_the_limit(lengths: list[int], num_ranks: int, slack: int) -> None:
    job = task(lengths, num_ranks, max(lengths) + slack)
    for name, way in WAYS.items():
        found = measures(job, way(job), is_padded=name == "padded")  # raises for what is no packing
        assert found["ranks"] >= 1 - 1e-9
        assert found["step"] >= found["ranks"] - 1e-9


def test_the_textbooks_case_of_largest_differencing() -> None:
    """8 7 6 5 4: Karmarkar and Karp leave a difference of 2, where 0 would be possible."""
    costs = [8, 7, 6, 5, 4]
    halves = largest_differencing(range(5), costs, 2)
    assert sorted(sum(costs[i] for i in half) for half in halves) == [14, 16]
    assert largest_differencing([], [], 3) == [[], [], []]
    assert cost_of([2]) == [2 * (12 * 4096 + 2)]


def test_first_fit_is_the_first_that_fits_and_not_the_last_or_the_best() -> None:
    assert ways.first_fit(task([2, 7, 1, 5], num_ranks=1, max_tokens=8)) == [[[0, 2, 3], [1]]]


def test_measures_by_hand() -> None:
    job = Task([4, 2, 2, 4], [4, 2, 2, 4], num_ranks=2, max_tokens=8, hidden_size=1)
    packed = measures(job, [[[0, 1], []], [[2], [3]]])
    assert packed == {"micro-batches": 2, "padding": 0.0, "unused": 1 - 12 / 32, "ranks": 1.0, "step": 10 / 6}
    filled = measures(job, [[[0, 1]], [[2, 3]]], is_padded=True)
    assert filled == {"micro-batches": 1, "padding": 4 / 16, "unused": 0.0, "ranks": 1.0, "step": 1.0}


def test_what_shared_prompts_save_by_hand() -> None:
    """Two prompts of 10 tokens, each with 3 answers of 5: one has 10 + 3 * 6 places in place of 45."""
    tokens = [[*range(100 * prompt, 100 * prompt + 10), *[1000 + i] * 5] for prompt in (0, 1) for i in range(3)]
    batch = Batch(torch.tensor(tokens).flatten(), torch.full((6,), 15))
    found = measure_shared(task([15] * 6, num_ranks=2, max_tokens=35), batch, 1)
    del found["seconds"]
    shares = {"unused": pytest.approx(1 - 56 / 70), "saved": pytest.approx(1 - 56 / 90)}
    assert found == {"micro-batches": 1, "apart": 2} | shares


@pytest.mark.parametrize(
    ("dealt", "said"),
    [
        ([[[0, 1]], [[2, 2]]], "lost or doubled"),
        ([[[0, 1]], [[2], [3]]], "unequal numbers"),
        ([[[0, 1, 3]], [[2]]], "beyond its limit"),
    ],
)
def test_what_is_no_packing_is_refused(dealt: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        measures(task([4, 2, 2, 4], max_tokens=8), dealt)


def test_a_ratio_is_the_median_over_cases_that_both_have() -> None:
    figures = {"padding": 0.0, "unused": 0.0, "ranks": 1.0, "step": 1.0}

    def row(work: str, way: str, **fields: float) -> dict[str, Any]:
        return {"work": work, "sequences": 1, "way": way, **figures, **fields}

    rows = [row("a", "megarl", seconds=1.0), row("a", "first_fit", seconds=3.0, unused=0.5)]
    rows += [row("b", "megarl", seconds=1.0), row("b", "first_fit", seconds=5.0, unused=0.0)]
    rows += [row("c", "megarl", seconds=1.0)]
    found = ratios(rows)
    assert found["seconds_first_fit_over_megarl"] == 4.0
    assert found["waste_first_fit_over_megarl"] == 1.5
    assert not any("karmarkar_karp" in name for name in found)
    shared = [{"way": SHARED, "answers": 4, "saved": share} for share in (0.1, 0.5, 0.2)]
    assert saved([*shared, {"way": "megarl"}]) == {"saved_4_answers": 0.2}


def test_a_quick_run_prints_its_ratios_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--json", "--device", "cpu", "--out", str(tmp_path)]
    assert page.run(bench_packing.work, bench_packing.parser(), words) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    figures = ("waste", "ranks", "step", "seconds")
    assert list(said)[-4:] == [f"{figure}_padded_over_megarl" for figure in figures]
    assert {row["way"] for row in said["rows"]} == {*WAYS, SHARED}
    for kind in WORK:
        shares = [row["saved"] for row in said["rows"] if row["work"] == kind and row["way"] == SHARED]
        assert len(shares) == len(ANSWERS)
        assert 0 < shares[0] < shares[1] < 1, "eight answers have more in common than four"
    assert said["step_padded_over_megarl"] > 1
    assert len(list(tmp_path.iterdir())) == 2
