"""What the planner predicts for runs whose numbers others published, beside these numbers.

    python benchmarks/plan/bench_plan.py          the table with the constants of megarl/plan/constants.py
    python benchmarks/plan/bench_plan.py --fit    fit them anew on the fitted half first, and print them

Rows, their sources and what had to be assumed are in benchmarks/published.yaml.  Half of the runs of each kind, drawn
by a seed before the first fit, is what constants are fitted on; the other half only checks them.  A step is shown with
its stages, and with the error of each stage that a source measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common import page
from benchmarks.plan.fit import GUESSES, at_bound, fit
from benchmarks.plan.rows import FITTED, HELD_OUT, KINDS, NEAR, NEITHER, SEED, Row, halves, load
from megarl.plan.constants import CONSTANTS, Constants

LEGEND = (
    "Nothing here was run: predictions are of megarl/plan, published numbers are other systems' own, with costs of "
    "their own. error: predicted / published - 1. half: fitted (the constants saw it), held out (they did "
    "not), neither (memory, on which nothing is fitted). stages: predicted seconds of a step's stages. parts: "
    "predicted / published of stages that a source measured. right: the row and each of its parts are within a factor "
    f"of {NEAR:g}; a sum whose parts are not is wrong, because their errors cancel."
)
PARTLY = (
    "{} of {} steps have a stage that a source measured; in the sums of the others, errors of stages may still cancel."
)
ALIKE = (
    "Many rows are of one system, and runs of one model on several sizes lie in both halves: the held-out error says "
    "how well the planner carries over to another run of these systems, not to an unknown one."
)

MENDED = (
    "The rule for the longest completion was mended after the held-out half had been looked at: it now ends at a limit "
    "of completions, where a run names one (most_response), and the constants were fitted again, which moved none. The "
    "rule for memory was mended with its rows in view (fsdp, busiest experts): they are no test of it. The rule for "
    "pushes of whole tensors was mended with all rows in view: ranks of a machine receive through the adapters of all "
    "of them, servers on the trainer's GPUs map tensors and receive nothing, and each bucket costs a request; the "
    "constants were fitted again, those of pushes on pushes alone."
)
MEASURED_PUSH = (
    "nemo-rl nccl deepseek-v3: 1342 GB in 14.21 s are 94 GB/s, more than the 50 GB/s of one adapter, by which the rule "
    "sends the whole model from one rank to every server: whatever was measured, it was another way of sending."
)
BOUND = (
    "At the bound that their guesses set, so that the fitted rows would have them larger: {}. They stand for costs "
    "that the model of time has no name for."
)


def work(options: argparse.Namespace) -> page.Result:
    rows, unpredicted = load()
    half = halves(rows)
    constants = CONSTANTS
    if options.fit:
        constants = fit([row for row in rows if half[row.name] == FITTED], told=lambda line: print(line, flush=True))
        print(to_paste(constants))
    kinds = [kind for kind in KINDS if any(row.kind == kind for row in rows)]
    return page.Result(
        theme="plan",
        device="cpu",
        title="The planner against published numbers",
        configuration={
            "seed of the halves": SEED,
            "fitted constants": ", ".join(f"{name}={getattr(constants, name):g}" for name in GUESSES),
        },
        rows=[cells(row, half[row.name], constants) for kind in kinds for row in rows if row.kind == kind],
        ratios=summary(rows, half, constants),
        notes=[
            *(LEGEND, partly(rows), ALIKE, MENDED, MEASURED_PUSH, *bounds(constants)),
            *(f"not predicted: {each['what']}: {each['reason']}" for each in unpredicted),
        ],
    )


def bounds(constants: Constants) -> list[str]:
    found = ", ".join(f"{name}={getattr(constants, name):g}" for name in at_bound(constants))
    return [BOUND.format(found)] if found else []


def partly(rows: Sequence[Row]) -> str:
    steps = [row for row in rows if row.kind == "step"]
    return PARTLY.format(sum(bool(row.stages) for row in steps), len(steps))


def cells(row: Row, half: str, constants: Constants) -> dict[str, Any]:
    """One line of the table."""
    job, predicted = row.job, row.predicted(constants)
    lowest, highest = row.spread
    return {
        "row": row.name,
        "kind": row.kind,
        "half": half,
        "GPUs": f"{job.actor.num_ranks if row.kind in ('training', 'memory') else job.num_gpus} {job.gpu.name}",
        "quantity": row.quantity,
        "published": row.published if lowest == highest else f"{lowest:g}-{highest:g}",
        "predicted": float(f"{predicted:.4g}"),
        "error": f"{predicted / row.published - 1:+.0%}",
        "right": "yes" if row.is_near(constants) else "no",
        "stages": ", ".join(f"{name} {seconds:.1f}" for name, seconds in row.parts(constants).items()),
        "parts": ", ".join(_part(row, name, constants) for name in row.stages),
        "assumed": "; ".join(row.assumed),
        "source": row.source,
    }


def _part(row: Row, name: str, constants: Constants) -> str:
    predicted, published = row.predicted(constants, name), row.stages[name]
    return f"{name} {predicted:.3g} / {published:g} ({predicted / published - 1:+.0%})"


def summary(rows: Sequence[Row], half: dict[str, str], constants: Constants = CONSTANTS) -> dict[str, float]:
    """Median of |log(predicted / published)| and share that is right: of both halves, of each kind, and of stages."""
    said: dict[str, float] = {}
    for name in (FITTED, HELD_OUT):
        said |= _figures(_key(name), [row for row in rows if half[row.name] == name], constants)
    stages = [(name, abs(error)) for row in rows for name, error in row.stage_errors(constants).items()]
    for stage in dict(stages):
        said[f"stage_{stage}_median_log_error"] = statistics.median(error for name, error in stages if name == stage)
    for kind in KINDS:
        for name in (FITTED, HELD_OUT, NEITHER):
            alike = [row for row in rows if (row.kind, half[row.name]) == (kind, name)]
            said |= _figures(f"{kind}_{_key(name)}", alike, constants) if alike else {}
    return {name: round(value, 4) for name, value in said.items()}


def _figures(name: str, rows: Sequence[Row], constants: Constants) -> dict[str, float]:
    right = sum(row.is_near(constants) for row in rows) / len(rows)
    return {f"{name}_median_log_error": statistics.median(errors_of(rows, constants)), f"{name}_within_1_5": right}


def errors_of(rows: Sequence[Row], constants: Constants = CONSTANTS) -> list[float]:
    return [abs(row.error(constants)) for row in rows]


def to_paste(constants: Constants) -> str:
    """Lines for megarl/plan/constants.py."""
    return "\n".join(f"    {name}: float = {getattr(constants, name):g}" for name in GUESSES)


def _key(half: str) -> str:
    return half.replace(" ", "_")


def parser() -> argparse.ArgumentParser:
    made = page.arguments(__doc__)
    made.set_defaults(device="cpu")
    made.add_argument("--fit", action="store_true", help="fit the constants anew, about a minute")
    return made


if __name__ == "__main__":
    raise SystemExit(page.run(work, parser()))
