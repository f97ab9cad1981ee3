"""What packing wastes, how evenly it loads the ranks, how long it takes: megarl beside Karmarkar-Karp and first-fit.

    python benchmarks/bench_packing.py            1,000 to 1,000,000 sequences
    python benchmarks/bench_packing.py --quick    one small case of each distribution

No model runs.  A sequence costs what it costs in a transformer: its tokens, and its attention, which grows with the
square of them.  Every way packs the same lengths; what it says is checked, then measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from packing_ways import WAYS, Dealt, Task
from page import Result, arguments, run

HIDDEN_SIZE = 4096  # for the costs: an 8B model's
SEED = 20
RANKS = {1_000: 8, 10_000: 64, 100_000: 256, 1_000_000: 1024}  # sequences -> data-parallel ranks
QUICK_RANKS = {300: 4}


@dataclass(frozen=True)
class Lengths:
    """Prompt and response of a kind of work: log-normal responses, cut off where the run's limit cuts them."""

    median: int  # tokens of a response
    sigma: float  # of its logarithm
    longest: int  # response
    prompt: int  # longest, shortest a quarter of it
    max_tokens: int  # of a micro-batch

    def draw(self, num_sequences: int, seed: int = SEED) -> list[int]:
        rng = np.random.default_rng(seed)
        response = rng.lognormal(np.log(self.median), self.sigma, num_sequences).clip(1, self.longest)
        prompt = rng.integers(self.prompt // 4, self.prompt + 1, num_sequences)
        return [int(n) for n in response.astype(np.int64) + prompt]


WORK = {
    "short answers": Lengths(median=180, sigma=0.4, longest=1024, prompt=256, max_tokens=16384),
    "mathematics": Lengths(median=1500, sigma=0.8, longest=8192, prompt=512, max_tokens=16384),
    "long reasoning": Lengths(median=7000, sigma=0.9, longest=32768, prompt=2048, max_tokens=36864),
}


def cost_of(lengths: Sequence[int]) -> list[int]:
    """As megarl.data.packing counts: L * (12 * hidden + L)."""
    return [n * (12 * HIDDEN_SIZE + n) for n in lengths]


def measures(task: Task, dealt: Dealt, *, is_padded: bool = False) -> dict[str, float]:
    """What a packing is worth.  ValueError for one that is none.

    padding: share of what is computed that is no token; unused: share of all micro-batches' room that nothing fills;
    ranks: the dearest rank over the mean of all; step: the same when all ranks wait for each other after every
    micro-batch, so that each round takes as long as its dearest.
    """
    _check(task, dealt)
    widths = [[_width(task, members, is_padded) for members in mine] for mine in dealt]
    computed, tokens = sum(map(sum, widths)), sum(task.lengths)
    num_rounds = len(dealt[0])
    costs = np.array([[_cost(task, members, is_padded) for members in mine] for mine in dealt], dtype=np.float64)
    mean = costs.sum() / len(dealt)
    return {
        "micro-batches": num_rounds,
        "padding": (computed - tokens) / computed,
        "unused": 1 - computed / (len(dealt) * num_rounds * task.max_tokens),
        "ranks": float(costs.sum(axis=1).max() / mean),
        "step": float(costs.max(axis=0).sum() / mean),
    }


def measure(task: Task, name: str, repeats: int) -> dict[str, Any]:
    """A row's measures and the median of its seconds."""
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        dealt = WAYS[name](task)
        taken.append(time.perf_counter() - begun)
    return measures(task, dealt, is_padded=name == "padded") | {"seconds": statistics.median(taken)}


def work(options: argparse.Namespace) -> Result:
    ranks = QUICK_RANKS if options.quick else {n: r for n, r in RANKS.items() if n <= options.sequences}
    if not ranks:
        raise ValueError(f"--sequences {options.sequences}: expected at least {min(RANKS)}")
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for kind, shape in WORK.items():
        slow: dict[str, float] = {}  # seconds a sequence, of ways that may take too long for the next size
        for num_sequences, num_ranks in ranks.items():
            lengths = shape.draw(num_sequences)
            task = Task(lengths, cost_of(lengths), num_ranks, shape.max_tokens, HIDDEN_SIZE)
            for name in WAYS:
                if slow.get(name, 0.0) * num_sequences > options.limit_s:
                    notes.append(f"{kind}, {num_sequences:,} sequences: {name} would take over {options.limit_s:g} s")
                    continue
                found = measure(task, name, 3 if num_sequences <= 10_000 else 1)
                slow[name] = found["seconds"] / num_sequences
                sys.stderr.write(f"{kind}, {num_sequences:,} sequences: {name} took {found['seconds']:.3g} s\n")
                rows.append({"work": kind, "sequences": num_sequences, "data ranks": num_ranks, "way": name, **found})
    return Result(
        "packing",
        "cpu",
        {"costs": f"L * (12 * {HIDDEN_SIZE} + L)", "seed": SEED, "lengths": {k: vars(v) for k, v in WORK.items()}},
        rows,
        ratios(rows),
        [LEGEND, *notes],
        title="Packing sequences into micro-batches",
    )


LEGEND = (
    "padding: share of what is computed that is no token; unused: share of the micro-batches' room that nothing "
    "fills; ranks: the dearest rank over the mean of all; step: the same where the ranks wait for each other after "
    "each micro-batch. Ratios: the median over all cases of the other's figure over megarl's, waste being 1 / share of "
    "the room that holds tokens; above 1 is better here."
)


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The other way's figure over megarl's, the median over the cases that both have."""
    cases: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["work"], row["sequences"]), {})[row["way"]] = row
    out = {}
    for name in WAYS:
        both = [(found[name], found["megarl"]) for found in cases.values() if name in found and name != "megarl"]
        for figure, of in FIGURES.items() if both else ():
            out[f"{figure}_{name}_over_megarl"] = statistics.median(of(other) / of(ours) for other, ours in both)
    return out


FIGURES = {
    "waste": lambda row: 1 / ((1 - row["padding"]) * (1 - row["unused"])),
    "ranks": lambda row: row["ranks"],
    "step": lambda row: row["step"],
    "seconds": lambda row: row["seconds"],
}


def _check(task: Task, dealt: Dealt) -> None:
    if sorted(i for mine in dealt for members in mine for i in members) != list(range(len(task.lengths))):
        raise ValueError("a packing lost or doubled a sequence")
    if len(dealt) != task.num_ranks or len({len(mine) for mine in dealt}) != 1:
        raise ValueError("a packing gave its ranks unequal numbers of micro-batches")
    if any(sum(task.lengths[i] for i in members) > task.max_tokens for mine in dealt for members in mine):
        raise ValueError("a packing filled a micro-batch beyond its limit")


def _width(task: Task, members: Sequence[int], is_padded: bool) -> int:
    """Tokens that are computed."""
    if is_padded and members:
        return len(members) * max(task.lengths[i] for i in members)
    return sum(task.lengths[i] for i in members)


def _cost(task: Task, members: Sequence[int], is_padded: bool) -> int:
    if is_padded and members:
        return len(members) * max(task.costs[i] for i in members)
    return sum(task.costs[i] for i in members)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--sequences", type=int, default=max(RANKS), help="no case has more (default 1,000,000)")
    made.add_argument("--limit-s", type=float, default=20.0, help="what would take longer is left out (default 20)")
    return arguments(made)


if __name__ == "__main__":
    raise SystemExit(run(work, parser()))
