"""One optimizer step of every loss under every split: the same value, gradient and statistics.

Each case is an optimizer step as the driver makes it (the step's columns once, from the whole step; then a plan) run by
Megatron's own schedule on gloo ranks, and compared with the same step on one rank in one micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from loss_cases import ALONE, GROUPS, NORMALIZED, make_data, now, run_cases
from loss_cover import ALL_SPLITS, FACTORS, LOSSES, MORE_SPLITS, ONE, SPLITS, VALUE, Case, cover, has_meaning, pairs
from spawn import Ranks
from tiny_models import write_model

from megarl.algo import estimate
from megarl.batch import Batch, Stats, merge_stats

pytestmark = pytest.mark.dist

# Float32 sums in another order.  Of a gradient, relative to the largest entry of its tensor or a hundredth of the
# largest of all: log-probs of 8 nats are off by 5e-7 and more after two layers, an exp passes that on as a relative
# error, and a few such errors meet in each entry; the worst that was seen is 6e-6.
GRADIENT = 2e-5
# Of a loss, relative to it or to the sum of its weights (a token loss of 1 everywhere), since its terms cancel.
LOSS = 2e-5
FAST, SLOW = cover(tuple(SPLITS)), cover(tuple(MORE_SPLITS))
PAIRS = ("dp2 tp2", "cp2 pp2")  # of two kinds of parallelism, which SPLITS does not have
ANY_SPLIT = [
    *(pytest.param(split, marks=pytest.mark.slow if " " in split else ()) for split in SPLITS),
    *(pytest.param(split, marks=pytest.mark.slow if split in PAIRS else pytest.mark.long) for split in MORE_SPLITS),
]


def of(split: str, loss: str | None = None) -> list[Case]:
    return [case for case in (*FAST, *SLOW) if case.split == split and loss in (None, case.loss)]


def typical(loss: str, **changes: str) -> Case:
    """One case of a loss with everything that it can be combined with."""
    actor = {} if loss == VALUE else {"kl": "low_var_kl", "correction": NORMALIZED, "entropy": "0.05"}
    settings: dict[str, Any] = {"loss": loss, "mode": "seq-mean-token-mean", "split": ONE, **actor, **changes}
    return Case(**settings)


MEAN = "seq-mean-token-mean"
EVERY_LOSS_OR_MODE = [(loss, MEAN) for loss in LOSSES] + [("ppo", mode) for mode in FACTORS["mode"] if mode != MEAN]
BATCHES = [  # what runs together, since making the models costs more than a case
    *(of(split) for split in (*SPLITS, *MORE_SPLITS)),
    *([replace(case, split=ONE) for case in of(split)] for split in (*SPLITS, *MORE_SPLITS)),
    [typical(loss, data=data) for loss in LOSSES for data in ("hard", "hard with zeros", "empty")],
    [typical(loss, data="empty", split="dp2 cp2") for loss in LOSSES],
    [typical(loss, mode=m, data=data) for loss, m in EVERY_LOSS_OR_MODE for data in ("mild", "trainable only")],
]


@dataclass(frozen=True)
class Step:
    """What an optimizer step gave, over all ranks."""

    value: float
    stats: Stats
    gradient: dict[str, torch.Tensor]
    micros: list[int]  # of each rank
    dummies: int

    @classmethod
    def of(cls, ranks: Sequence[dict[str, Any]]) -> Step:
        return cls(
            sum(rank["value"] for rank in ranks),
            merge_stats([rank["stats"] for rank in ranks]),
            ranks[0]["gradient"],
            [rank["num_micros"] for rank in ranks],
            sum(rank["num_dummies"] for rank in ranks),
        )

    def error(self, expected: Step) -> float:
        """Of the gradient."""
        assert sorted(self.gradient) == sorted(expected.gradient)
        scale = 1e-2 * max(t.abs().max().item() for t in expected.gradient.values())
        assert scale > 1e-5, "the loss moves something"
        return max(
            (self.gradient[name] - t).abs().max().item() / max(t.abs().max().item(), scale)
            for name, t in expected.gradient.items()
        )


@dataclass
class Bench:
    """Ranks, and what they have found; the cases of a split run together."""

    folders: dict[str, str]
    worlds: dict[int, Ranks]
    data: dict[str, Batch] = field(default_factory=dict)
    found: dict[Case, Step] = field(default_factory=dict)

    def step(self, case: Case) -> Step:
        if case not in self.found:
            self._run(next((batch for batch in BATCHES if case in batch), [case]))
        return self.found[case]

    def reference(self, case: Case) -> Step:
        """The same on one rank in one micro-batch."""
        return self.step(replace(case, split=ONE))

    def _run(self, cases: Sequence[Case]) -> None:
        """Cases of one split."""
        ranks = self.worlds[ALL_SPLITS[cases[0].split].ranks].run(
            run_cases, self.folders, cases, self.data, timeout_s=240
        )
        self.found |= {case: Step.of([rank[i] for rank in ranks]) for i, case in enumerate(cases)}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, two_ranks: Ranks) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("models")
    folders = {
        name: str(write_model(root / name, "qwen3", tied=True, seed=seed, num_hidden_layers=2))
        for seed, name in enumerate(("actor", "reference"), start=1)
    }
    with Ranks(1) as one, Ranks(4) as four:
        bench = Bench(folders, {1: one, 2: two_ranks, 4: four})
        bench.data = make_data(*one.run(now, folders)[0])
        yield bench


@pytest.mark.parametrize("cases", [FAST, SLOW], ids=["fast", "slow"])
def test_cases_are_a_cover(cases: list[Case]) -> None:
    factors = {**FACTORS, "split": sorted({case.split for case in cases})}
    assert len(factors["split"]) == len(SPLITS)
    wanted = [((a, x), (b, y)) for (a, x), (b, y) in pairs(factors) if has_meaning({a: x, b: y})]
    missing = [pair for pair in wanted if not any(all(getattr(c, a) == x for a, x in pair) for c in cases)]
    assert missing == []
    without = [pair for pair in pairs(factors) if pair not in wanted]
    assert all(("loss", VALUE) in pair for pair in without), "only a critic has less than all of it"
    assert len(without) == sum(len(FACTORS[name]) - 1 for name in ("kl", "correction", "entropy"))
    assert len(cases) < 1.3 * len(LOSSES) * len(SPLITS), "no list of cases has fewer than one of each loss and split"


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("split", ANY_SPLIT)
def test_value_and_gradient_do_not_depend_on_the_split(bench: Bench, split: str, loss: str) -> None:
    assert of(split, loss), "every loss goes along every axis"
    for case in of(split, loss):
        got, expected = bench.step(case), bench.reference(case)
        assert (error := got.error(expected)) < GRADIENT, f"{case}: gradient off by {error:.1e}"
        weight = abs(next(stat.weight for name, stat in expected.stats.items() if name.endswith("_loss")))
        error = abs(got.value - expected.value) / max(abs(expected.value), weight)
        assert error < LOSS, f"{case}: loss off by {error:.1e}"


@pytest.mark.parametrize("split", ANY_SPLIT)
def test_statistics_do_not_depend_on_the_split(bench: Bench, split: str) -> None:
    for case in of(split):
        got, expected = bench.step(case).stats, bench.reference(case).stats
        assert sorted(got) == sorted(expected)
        for name, stat in expected.items():
            assert got[name].result() == pytest.approx(stat.result(), rel=2e-5, abs=5e-6), f"{case}: {name}"


@pytest.mark.parametrize("split", ANY_SPLIT)
def test_a_split_is_what_it_says(bench: Bench, split: str) -> None:
    for loss, units in (("ppo", 16), ("gspo", 13)):  # rows, samples
        how, step = ALL_SPLITS[split], bench.step(of(split, loss)[0])
        assert step.micros == [how.micros] * how.ranks
        assert step.dummies == (16 - units if split == "dp4 micro4" else 0), "16 micro-batches of one"


def test_data_is_what_it_says(bench: Bench) -> None:
    assert bench.data["mild"].rows.tolist() == [1, 1, 1, 1, 1, 2, 1, 1, 2, 1, 1, 1, 2]
    hard, scored, groups = bench.data["hard"], bench.data["scored"], Counter(GROUPS)
    masked = hard.columns["response_mask"] == 0
    assert all(hard.columns[name][masked].isnan().all() for name in hard.columns if name != "response_mask")
    assert not any(hard.columns[name][~masked].isnan().any() for name in hard.columns)
    per_sequence = [int(part.sum()) for part in hard.split(hard.columns["response_mask"])]
    assert per_sequence.count(0) == 2 and per_sequence.count(1) >= 2
    assert len(set(groups.values())) > 2 and groups[GROUPS[ALONE]] == 1
    advantages = scored.split(scored.columns["advantages"])
    assert not advantages[ALONE].any() and all(a.any() for n, a in zip(per_sequence, advantages, strict=True) if n > 9)


@pytest.mark.parametrize("loss", LOSSES)
def test_nan_at_a_masked_place_changes_nothing(bench: Bench, loss: str) -> None:
    nan, zero = (bench.step(typical(loss, data=data)) for data in ("hard", "hard with zeros"))
    assert nan.value == zero.value
    for name, gradient in zero.gradient.items():
        assert gradient.isfinite().all()
        assert torch.equal(nan.gradient[name], gradient), name


@pytest.mark.parametrize(("loss", "mode"), EVERY_LOSS_OR_MODE)
def test_sequences_without_a_trainable_token_change_nothing(bench: Bench, loss: str, mode: str) -> None:
    expected = bench.step(typical(loss, mode=mode, data="trainable only"))
    got = bench.step(typical(loss, mode=mode))
    assert got.error(expected) < GRADIENT
    assert got.value == pytest.approx(expected.value, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("split", [ONE, "dp2 cp2"])
@pytest.mark.parametrize("loss", LOSSES)
def test_an_empty_step_has_no_gradient(bench: Bench, loss: str, split: str) -> None:
    """The driver skips it and counts it: tests/roles/test_handles.py."""
    step = bench.step(typical(loss, data="empty", split=split))
    assert step.value == 0
    assert not any(gradient.any() for gradient in step.gradient.values())
    assert all(stat.weight == 0 for stat in step.stats.values() if stat.kind == "mean")


def test_a_batch_of_groups_of_one_has_no_policy_gradient(bench: Bench) -> None:
    mild = bench.data["mild"].with_per_sequence(score=torch.arange(13.0), group=torch.arange(13))
    bench.data["alone"], stats = estimate(mild, adv_estimator="grpo")
    assert stats["algorithm/groups_of_one"].result() == 11, "13 sequences, of which 11 have a trainable token"
    step = bench.step(Case("ppo", "token-mean", ONE, data="alone"))
    assert step.value == 0
    assert not any(gradient.any() for gradient in step.gradient.values())


@pytest.mark.parametrize(
    "case",
    [
        Case("ppo", "token-mean", "micro4"),
        Case("ppo", "seq-mean-token-mean", "micro4"),
        Case("gpg", "prompt-mean-token-mean", "micro4"),
        Case("gspo", "seq-mean-token-sum", "micro4"),
        Case("ppo", "token-sum", "micro4", correction=NORMALIZED),
        Case("clip_cov", "token-sum", "micro4"),
        Case("kl_cov", "token-sum", "micro4"),
    ],
    ids=lambda case: f"{case.loss} {case.mode} {case.correction}",
)
def test_columns_made_inside_each_micro_batch_would_show(bench: Bench, case: Case) -> None:
    """The negative control: with denominators, means or choices of a micro-batch instead of the step's."""
    expected = bench.reference(case)
    assert bench.step(case).error(expected) < GRADIENT
    assert bench.step(replace(case, inside=True)).error(expected) > 100 * GRADIENT


def test_rows_of_a_sample_that_part_would_show_in_a_ratio_of_the_sample(bench: Bench) -> None:
    """The negative control: with the loss of a sequence on each row alone."""
    mild = bench.data["mild"]
    bench.data["rows alone"] = mild.by_row()
    case = Case("gspo", "token-mean", ONE)
    assert bench.step(replace(case, data="rows alone")).error(bench.step(case)) > 100 * GRADIENT
    case = Case("ppo", "token-mean", ONE)
    assert bench.step(replace(case, data="rows alone")).error(bench.step(case)) < GRADIENT


def test_columns_made_inside_do_not_show_where_none_looks_beyond_its_token(bench: Bench) -> None:
    case = Case("ppo", "token-sum", "micro4")
    assert bench.step(replace(case, inside=True)).error(bench.reference(case)) < GRADIENT
