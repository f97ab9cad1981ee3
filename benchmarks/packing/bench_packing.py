"""What packing wastes, how evenly it loads the ranks, how long it takes: megarl beside Karmarkar-Karp and first-fit.

    python benchmarks/packing/bench_packing.py            1,000 to 1,000,000 sequences
    python benchmarks/packing/bench_packing.py --quick    one small case of each distribution

No model runs.  A sequence costs what it costs in a transformer: its tokens, and its attention, which grows with the
square of them.  Every way packs the same lengths; what it says is checked, then measured.  Where several answers have
one prompt, megarl packs them together and computes the prompt once: how many places that saves, and how long it takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.page import Result, arguments, run
from benchmarks.packing.ways import WAYS, Dealt, Task
from megarl.data.packing import plan
from megarl.data.prefix_tree import CommonPrefixes, PrefixTree, prefix_groups, runs
from megarl.samples.batch import Batch

HIDDEN_SIZE = 4096  # for the costs: an 8B model's
SEED = 20
RANKS = {1_000: 8, 10_000: 64, 100_000: 256, 1_000_000: 1024}  # sequences -> data-parallel ranks
QUICK_RANKS = {300: 4}
ANSWERS = (4, 8, 16)  # to a prompt
MOST_SHARED = 1_000  # sequences: for common prefixes there must be tokens, of 1,000 long ones 64 MB
VOCAB_SIZE = 151_936
SHARED = "megarl, shared prompts"


@dataclass(frozen=True)
class Lengths:
    """Prompt and response of a kind of work: log-normal responses, cut off where the run's limit cuts them."""

    median: int  # tokens of a response
    sigma: float  # of its logarithm
    longest: int  # response
    prompt: int  # longest, shortest a quarter of it
    max_tokens: int  # of a micro-batch

    def draw(self, num_sequences: int, seed: int = SEED) -> list[int]:
        """Tokens of each sequence, all of different prompts."""
        prompt, response = self._parts(num_sequences, seed)
        return [int(n) for n in prompt + response]

    def draw_groups(self, num_sequences: int, answers: int, seed: int = SEED) -> Batch:
        """Random tokens; each `answers` sequences that follow each other have the prompt of the first of them."""
        prompt, response = self._parts(num_sequences, seed)
        first = np.arange(num_sequences) // answers * answers
        prompt = prompt[first]
        lengths = prompt + response
        starts = lengths.cumsum() - lengths
        tokens = np.random.default_rng(seed).integers(0, VOCAB_SIZE, lengths.sum())
        tokens[runs(starts, prompt)] = tokens[runs(starts[first], prompt)]
        return Batch(torch.from_numpy(tokens), torch.from_numpy(lengths))

    def _parts(self, num_sequences: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of each sequence's prompt and response."""
        rng = np.random.default_rng(seed)
        response = rng.lognormal(np.log(self.median), self.sigma, num_sequences).clip(1, self.longest)
        prompt = rng.integers(self.prompt // 4, self.prompt + 1, num_sequences)
        return prompt, response.astype(np.int64)


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
    widths = [[_width(task, members, is_padded) for members in mine] for mine in dealt]
    _check(task, dealt, widths)
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


def measure_shared(task: Task, batch: Batch, repeats: int) -> dict[str, float]:
    """The same where what sequences begin with in common is computed once, and the share of the tokens that this saves.

    apart: micro-batches of the same sequences if nothing is shared; seconds: the driver finds what is in common, and
    packs.  ValueError for no packing.
    """
    num_ranks, max_tokens, hidden_size = task.num_ranks, task.max_tokens, task.hidden_size
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        together = prefix_groups(batch, num_ranks, max_tokens=max_tokens, max_sequences=None, hidden_size=hidden_size)
        plans = plan(task.lengths, num_ranks, max_tokens=max_tokens, hidden_size=hidden_size, groups=together)
        dealt = [rank.micro_batches for rank in plans]
        taken.append(time.perf_counter() - begun)
    apart = plan(task.lengths, num_ranks, max_tokens=max_tokens, hidden_size=hidden_size)
    places = [[_places(batch, members) for members in mine] for mine in dealt]
    _check(task, dealt, places)
    computed = sum(map(sum, places))
    return {
        "micro-batches": len(dealt[0]),
        "apart": len(apart[0].micro_sizes),
        "unused": 1 - computed / (len(dealt) * len(dealt[0]) * task.max_tokens),
        "saved": 1 - computed / batch.num_tokens,
        "seconds": statistics.median(taken),
    }


def shared_rows(kind: str, num_sequences: int, num_ranks: int) -> Iterator[dict[str, Any]]:
    """A row for each number of answers to a prompt."""
    shape = WORK[kind]
    for answers in ANSWERS:
        batch = shape.draw_groups(num_sequences, answers)
        lengths = batch.lengths.tolist()
        task = Task(lengths, cost_of(lengths), num_ranks, shape.max_tokens, HIDDEN_SIZE)
        found = measure_shared(task, batch, 3)
        case = {"work": kind, "sequences": num_sequences, "data ranks": num_ranks, "answers": answers}
        yield {**case, "way": SHARED, **found}


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
            if num_sequences <= MOST_SHARED:
                rows += shared_rows(kind, num_sequences, num_ranks)
    return Result(
        "packing",
        "cpu",
        {"costs": f"L * (12 * {HIDDEN_SIZE} + L)", "seed": SEED, "lengths": {k: vars(v) for k, v in WORK.items()}},
        rows,
        saved(rows) | ratios(rows),
        [LEGEND, *notes],
        title="Packing sequences into micro-batches",
    )


LEGEND = (
    "padding: share of what is computed that is no token; unused: share of the micro-batches' room that nothing "
    "fills; ranks: the dearest rank over the mean of all; step: the same where the ranks wait for each other after "
    "each micro-batch. Ratios: the median over all cases of the other's figure over megarl's, waste being 1 / share of "
    "the room that holds tokens; above 1 is better here. saved: share of the tokens that are not computed because they "
    "stand in a prompt that several answers have, in the ratios the median over the kinds of work; apart: "
    "micro-batches of the same sequences if nothing is shared."
)


def saved(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The share of the tokens that shared prompts save, for each number of answers the median over the cases."""
    of_answers: dict[int, list[float]] = {}
    for row in rows:
        if row["way"] == SHARED:
            of_answers.setdefault(row["answers"], []).append(row["saved"])
    return {f"saved_{answers}_answers": statistics.median(found) for answers, found in of_answers.items()}


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


def _check(task: Task, dealt: Dealt, widths: list[list[int]]) -> None:
    if sorted(i for mine in dealt for members in mine for i in members) != list(range(len(task.lengths))):
        raise ValueError("a packing lost or doubled a sequence")
    if len(dealt) != task.num_ranks or len({len(mine) for mine in dealt}) != 1:
        raise ValueError("a packing gave its ranks unequal numbers of micro-batches")
    if any(width > task.max_tokens for mine in widths for width in mine):
        raise ValueError("a packing filled a micro-batch beyond its limit")


def _width(task: Task, members: Sequence[int], is_padded: bool) -> int:
    """Tokens that are computed."""
    if is_padded and members:
        return len(members) * max(task.lengths[i] for i in members)
    return sum(task.lengths[i] for i in members)


def _places(batch: Batch, members: list[int]) -> int:
    """Tokens that are computed where what sequences have in common stands once."""
    if not members:
        return 0
    own = batch.select(members)
    return PrefixTree.of(own, CommonPrefixes.of(own)).num_places


def _cost(task: Task, members: Sequence[int], is_padded: bool) -> int:
    if is_padded and members:
        return len(members) * max(task.costs[i] for i in members)
    return sum(task.costs[i] for i in members)


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--sequences", type=int, default=max(RANKS), help="no case has more (default 1,000,000)")
    made.add_argument("--limit-s", type=float, default=20.0, help="what would take longer is left out (default 20)")
    return made


if __name__ == "__main__":
    raise SystemExit(run(work, parser()))
