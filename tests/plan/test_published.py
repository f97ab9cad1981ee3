"""The published rows: they load, their halves are as the seed says, and the planner stays as near them as it was."""

import json
import math
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.common import page
from benchmarks.plan import bench_plan
from benchmarks.plan.bench_plan import bounds, cells, summary, to_paste
from benchmarks.plan.fit import GUESSES, Guess, at_bound, cost, fit, guessed, parts_of, pull
from benchmarks.plan.rows import FITTED, HELD_OUT, KINDS, NEITHER, QUANTITIES, Row, halves, load
from megarl.plan.constants import CONSTANTS

# Median of |log(predicted / published)|, and the share of rows that are right within a factor of 1.5, as they were
# measured when the constants were fitted (steps: since moments come beside passes); and margins.
MEASURED = {
    ("step", FITTED): (0.366, 0.43), ("step", HELD_OUT): (0.270, 0.64),
    ("training", FITTED): (0.181, 0.74), ("training", HELD_OUT): (0.119, 0.78),
    ("push", FITTED): (0.418, 0.43), ("push", HELD_OUT): (1.382, 0.0),
    ("rollout", HELD_OUT): (1.735, 0.0), ("memory", NEITHER): (0.025, 1.0),
}  # fmt: skip
MARGIN, SHARE_MARGIN = 0.02, 0.08
PLANNER = page.ROOT / "docs/planner.md"


@cache
def rows() -> list[Row]:
    return load()[0]


def of(half: str) -> list[Row]:
    found = halves(rows())
    return [row for row in rows() if found[row.name] == half]


def test_every_row_says_where_it_is_from_and_what_it_measures():
    found, unpredicted = load()
    assert len({row.name for row in found}) == len(found) > 80
    assert {row.kind for row in found} == set(KINDS)
    assert {row.quantity for row in found} == set(QUANTITIES)
    assert all(row.source and row.published > 0 and row.spread[0] <= row.published <= row.spread[1] for row in found)
    assert all(each["what"] and each["reason"] for each in unpredicted)


def test_a_layout_is_one_that_its_ranks_can_have():
    for row in rows():
        job = row.job
        assert job.actor.layout.data_parallel_size(job.actor.num_ranks) >= 1, row.name
        layers = job.actor.hf["num_hidden_layers"]
        assert sum(job.actor.layout.stage_layers(layers)) == layers, row.name
        assert job.optimizer_steps * job.mini_batch <= max(job.prompts, job.mini_batch), row.name


def test_a_reference_lies_as_the_actor_does():
    row = next(row for row in rows() if row.name == "nemo-rl qwen3-32b sync")
    assert row.job.reference is not None
    assert (row.job.reference.layout, row.job.reference.optimizer) == (row.job.actor.layout, None)


def test_the_halves_are_as_the_seed_says():
    found = halves(rows())
    assert [row.name for row in of(NEITHER)] == [row.name for row in rows() if row.kind == "memory"]
    assert (len(of(FITTED)), len(of(HELD_OUT))) == (40, 41)
    assert found["nemo-rl llama-3.1-8b sync"] == FITTED and found["nemo-rl llama-3.1-8b one off"] == HELD_OUT
    assert found["megatron-lm 70b"] == FITTED and found["megatron-lm 7.1b"] == HELD_OUT
    assert halves(list(reversed(rows()))) == found  # the order of the file does not matter
    assert halves(rows(), seed=7) != found


def test_rows_of_a_run_are_in_one_half():
    found = halves(rows())
    for run in {row.run for row in rows()}:
        assert len({found[row.name] for row in rows() if row.run == run and row.kind != "memory"}) <= 1


@pytest.mark.parametrize(("kind", "half"), MEASURED)
def test_predictions_are_as_near_as_they_were(kind, half):
    said, (median, share) = summary(rows(), halves(rows())), MEASURED[kind, half]
    name = f"{kind}_{half.replace(' ', '_')}"
    assert said[f"{name}_median_log_error"] == pytest.approx(median, abs=MARGIN)
    assert said[f"{name}_within_1_5"] == pytest.approx(share, abs=SHARE_MARGIN)


def test_every_kind_and_half_is_measured():
    found = halves(rows())
    assert {(row.kind, found[row.name]) for row in rows()} == set(MEASURED)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("step", "whole RL steps"), ("training", "training"), ("push", "pushes"), ("rollout", "generation")],
)
def test_the_planners_page_says_these_numbers(kind, said):
    measured = summary(rows(), halves(rows()))
    cells = [said]
    for half in ("fitted", "held_out"):
        count = sum(row.kind == kind and halves(rows())[row.name] == half.replace("_", " ") for row in rows())
        error, share = (measured.get(f"{kind}_{half}_{name}", 0.0) for name in ("median_log_error", "within_1_5"))
        cells += [f"{math.exp(error):.2f}", f"{round(share * count)} of {count}"] if count else ["", ""]
    assert f"| {' | '.join(cells)} |" in PLANNER.read_text()


def test_readme_says_how_near_published_memory_is():
    ratios = [math.exp(row.error()) - 1 for row in of(NEITHER)]
    said = f"{-min(ratios):.0%} too low and {max(ratios):.0%} too high".replace("%", " %")
    assert said in " ".join(PLANNER.read_text().split())


def test_constants_at_their_bound_are_named():
    assert at_bound() == ["expert_layer_s", "decode_step_s", "sequence_s"]
    (line,) = bounds(CONSTANTS)
    assert f"sequence_s={CONSTANTS.sequence_s:g}" in line
    assert not bounds(guessed())


def test_experts_of_equal_load_cost_less():
    row = next(row for row in rows() if row.name == "bridge qwen3-235b fp8")
    assert row.balanced and row.predicted() > replace(row, balanced=False).predicted()


def test_constants_of_pushes_see_pushes_alone():
    (of_pushes, pushes), (of_steps, others) = parts_of(of(FITTED))
    assert {row.kind for row in pushes} == {"push"} and "push" not in {row.kind for row in others}
    assert len(pushes) + len(others) == len(of(FITTED))
    assert sorted([*of_pushes, *of_steps]) == sorted(GUESSES)


def test_a_sum_that_is_right_by_cancellation_is_wrong():
    plain = next(row for row in rows() if row.name == "nemo-rl qwen3-32b sync")
    step, push = plain.predicted(), plain.predicted(quantity="push_s")
    exact = replace(plain, published=step)
    assert exact.error() == 0 and exact.is_near() and not exact.stage_errors()
    right, wrong = (replace(exact, stages={"push_s": push / factor}) for factor in (1.4, 1.6))
    assert right.stage_errors() == {"push_s": pytest.approx(math.log(1.4))} and right.is_near()
    assert wrong.error() == 0 and not wrong.is_near()
    said = bench_plan._figures("step", [right, wrong], CONSTANTS)
    assert said == {"step_median_log_error": 0.0, "step_within_1_5": 0.5}
    line = cells(wrong, HELD_OUT, CONSTANTS)
    assert (line["error"], line["right"]) == ("+0%", "no") and line["parts"].endswith("(+60%)")


def test_a_step_is_shown_with_its_stages():
    row = next(row for row in rows() if row.name == "nemo-rl qwen3-32b sync")
    assert sum(row.parts().values()) == pytest.approx(row.predicted())
    assert cells(row, FITTED, CONSTANTS)["stages"].startswith("gen ")
    assert next(row for row in rows() if row.kind == "push").parts() == {}


@pytest.mark.full
def test_a_fit_from_the_guesses_ends_at_the_shipped_constants():
    found = fit(of(FITTED))
    for name in GUESSES:
        assert getattr(found, name) == pytest.approx(getattr(CONSTANTS, name), rel=0.05), name


def test_a_fit_finds_the_constant_that_rows_were_made_with():
    """Rows that predict themselves with another share of the peak: the fit goes there, as far as the guess lets it."""
    chosen = [row for row in of(FITTED) if row.name.startswith("megatron-lm")]
    true = replace(guessed(), matmul=0.6)
    made = [replace(row, published=row.predicted(true)) for row in chosen]
    found = fit(made)
    assert cost(made, found) < cost(made, guessed())
    assert 0.6 < found.matmul < guessed().matmul - 0.02


def test_a_pull_is_round_at_the_bottom_and_straight_above():
    assert pull(0.0) == 0.0 and pull(0.01) < 0.001
    assert pull(2.0) - pull(1.0) == pytest.approx(1.0, abs=0.01)
    assert Guess(2.0, 1.5).surprise(3.0) == pytest.approx(1.0)
    assert Guess(2.0, 1.5).surprise(2.0) == 0.0


def test_a_line_of_the_table():
    row = next(row for row in rows() if row.name == "nemo-rl reshard qwen3-4b")
    said = cells(row, FITTED, CONSTANTS)
    assert said["published"] == "0.21-0.34" and said["GPUs"] == "16 h100" and "as many GPUs" in said["assumed"]
    assert float(said["error"].rstrip("%")) == pytest.approx(100 * (said["predicted"] / row.published - 1), abs=1)


def test_a_whole_run(tmp_path, capsys):
    assert page.run(bench_plan.work, bench_plan.parser(), ["--out", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(said["rows"]) == len(rows()) and list(said)[-1] == "memory_neither_within_1_5"
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".json", ".md"]


def test_constants_are_printed_as_they_are_written():
    assert f"    matmul: float = {CONSTANTS.matmul:g}" in to_paste(CONSTANTS).splitlines()
