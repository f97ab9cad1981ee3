"""One optimizer step of every loss under every split: the same value, gradient and statistics.

Each case is an optimizer step as the driver makes it (the step's columns once, from the whole step; then a plan) run by
Megatron's own schedule on gloo ranks, and compared with the same step on one rank in one micro-batch.  What holds for
any partition of tokens, and that columns of a micro-batch in the place of the step's would show, is in
tests/algo/test_split_invariance.py.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
from loss_cases import ALONE, FACTORS, GROUPS, LOSSES, ONE, SPLITS, VALUE, cover, make_data, now, pairs, run_cases
from parity_compare import assert_same_gradient
from rank_answers import Answers
from spawn import Ranks
from tiny_models import write_model

from megarl.samples.batch import Batch, merge_stats

pytestmark = pytest.mark.dist

# Of a loss, relative to it or to the sum of its weights (a token loss of 1 everywhere), since its terms cancel.
LOSS = 2e-5
CASES = cover()
FAST = ("micro4", "dp2", "cp2", "tp2", "tp2+sp", "pp2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: str(write_model(root / name, "qwen3", tied=True, seed=seed, num_hidden_layers=2))
        for seed, name in enumerate(("actor", "reference"), start=1)
    }


@pytest.fixture(scope="module")
def data(folders: dict[str, str], one_rank: Ranks) -> dict[str, Batch]:
    return make_data(*one_rank.run(now, folders)[0])


@pytest.fixture(scope="module")
def found(
    folders: dict[str, str], data: dict[str, Batch], one_rank: Ranks, two_ranks: Ranks, four_ranks: Ranks
) -> Answers:
    """Each case, and the same on one rank in one micro-batch."""
    worlds, groups = {1: one_rank, 2: two_ranks, 4: four_ranks}, []
    for split, how in SPLITS.items():
        own = [case for case in CASES if case.split == split]
        for cases, ranks in ((own, worlds[how.ranks]), ([replace(case, split=ONE) for case in own], one_rank)):
            groups.append((cases, partial(ranks.run, run_cases, folders, cases, data, timeout_s=240)))
    return Answers(*groups)


def test_cases_are_a_cover() -> None:
    every = list(pairs({**FACTORS, "split": tuple(SPLITS)}))
    occurring = {frozenset(pair) for case in CASES for pair in combinations(vars(case).items(), 2)}
    without = [pair for pair in every if pair not in occurring]
    assert all(("loss", VALUE) in pair for pair in without), "only a critic has less than all of it"
    assert len(without) == sum(len(FACTORS[name]) - 1 for name in ("kl", "correction", "entropy"))
    assert len(CASES) < 1.3 * len(LOSSES) * len(SPLITS), "no list of cases has fewer than one of each loss and split"


@pytest.mark.parametrize(
    "split", [pytest.param(split, marks=() if split in FAST else pytest.mark.full) for split in SPLITS]
)
def test_value_gradient_and_statistics_do_not_depend_on_the_split(found: Answers, split: str) -> None:
    cases, how = [case for case in CASES if case.split == split], SPLITS[split]
    assert {case.loss for case in cases} == set(LOSSES), "every loss goes along every axis"
    for case in cases:
        got, expected = found[case], found[replace(case, split=ONE)]
        assert [rank["num_micros"] for rank in got] == [how.micros] * how.ranks
        assert_same_gradient(got[0]["gradient"], expected[0]["gradient"])
        parts, whole = (merge_stats([rank["stats"] for rank in ranks]) for ranks in (got, expected))
        weight = abs(next(stat.weight for name, stat in whole.items() if name.endswith("_loss")))
        value, wanted = (sum(rank["value"] for rank in ranks) for ranks in (got, expected))
        assert abs(value - wanted) < LOSS * max(abs(wanted), weight), case
        assert sorted(parts) == sorted(whole)
        for name, stat in whole.items():
            assert parts[name].result() == pytest.approx(stat.result(), rel=2e-5, abs=5e-6), f"{case}: {name}"


def test_data_is_what_it_says(data: dict[str, Batch]) -> None:
    assert data["mild"].rows.tolist() == [1, 1, 1, 1, 1, 2, 1, 1, 2, 1, 1, 1, 2]
    hard, scored, groups = data["hard"], data["scored"], Counter(GROUPS)
    masked = hard.columns["response_mask"] == 0
    assert all(hard.columns[name][masked].isnan().all() for name in hard.columns if name != "response_mask")
    assert not any(hard.columns[name][~masked].isnan().any() for name in hard.columns)
    per_sequence = [int(part.sum()) for part in hard.split(hard.columns["response_mask"])]
    assert per_sequence.count(0) == 2 and per_sequence.count(1) >= 2
    assert len(set(groups.values())) > 2 and groups[GROUPS[ALONE]] == 1
    advantages = scored.split(scored.columns["advantages"])
    assert not advantages[ALONE].any() and all(a.any() for n, a in zip(per_sequence, advantages, strict=True) if n > 9)
