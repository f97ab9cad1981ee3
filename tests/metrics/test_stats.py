import math

import numpy as np
import pytest
import torch

from megarl.algo.tally import Tally
from megarl.metrics.computing.stats import batch_stats, finalise, reward_stats
from megarl.samples.batch import Batch, Stat, merge_stats
from megarl.samples.sample import Completion, Prompt, Sample, VersionSpan


def example() -> Batch:
    """Three sequences: prompt 2 + response 3 with a tool token, prompt 1 + response 1, and one that is all prompt."""
    nan = math.nan
    columns = {
        "response_mask": [0, 0, 1, 0, 1, 0, 1, 0, 0],
        "token_level_rewards": [nan, nan, -0.5, nan, 2.0, nan, 1.0, nan, nan],
        "advantages": [nan, nan, 1.0, nan, 2.0, nan, 3.0, nan, nan],
    }
    rows = {
        "score": torch.tensor([2.0, 1.0, 0.0]),
        "version_min": torch.tensor([3, 4, 5]),
        "truncated": torch.tensor([1, 0, 0]),
    }
    tensors = {name: torch.tensor(c, dtype=torch.float32) for name, c in columns.items()}
    return Batch(torch.zeros(9, dtype=torch.int64), torch.tensor([5, 2, 2]), tensors, rows)


def test_batch_statistics_by_hand():
    found = batch_stats(example(), version=5)
    by_hand = {  # mean, max, min
        "critic/score": (1.0, 2.0, 0.0),
        "critic/rewards": (2.5 / 3, 1.5, 0.0),
        "critic/advantages": (2.0, 3.0, 1.0),
        "prompt_length": (5 / 3, 2.0, 1.0),
        "response_length": (4 / 3, 3.0, 0.0),
    }
    spreads = {name: tuple(found[f"{name}/{key}"] for key in ("mean", "max", "min")) for name in by_hand}
    assert spreads == {name: pytest.approx(numbers, abs=1e-7) for name, numbers in by_hand.items()}
    assert found["critic/advantages/std"] == pytest.approx(math.sqrt(2 / 3), abs=1e-7)
    assert found["response_length/clip_ratio"] == pytest.approx(1 / 3)
    lags = {name: number for name, number in found.items() if "version_lag" in name}
    assert lags == {"off_policy/version_lag/mean": 1.0, "off_policy/version_lag/max": 2.0}


def test_ages_of_tokens_by_hand():
    """Version 5 is in training; the four trainable tokens are of ages 4, 0, 0 and 12."""
    versions = torch.tensor([-1, -1, 1, -1, 5, -1, 5, -1, -7], dtype=torch.int32)
    mask = torch.tensor([0, 0, 1, 0, 1, 0, 1, 0, 1.0])
    batch = example().with_columns(versions=versions, response_mask=mask)
    found = {name: value for name, value in batch_stats(batch, version=5).items() if "token_age" in name}
    assert found == {
        "off_policy/token_age/mean": 4.0,
        "off_policy/token_age/p50": 0.0,
        "off_policy/token_age/p99": 12.0,
        "off_policy/token_age/max": 12.0,
        "off_policy/token_age/share/age_0": 0.5,
        "off_policy/token_age/share/age_3_4": 0.25,
        "off_policy/token_age/share/age_9_up": 0.25,
    }
    assert not any("token_age" in name for name in batch_stats(batch))
    newest = batch.with_columns(versions=torch.full((9,), 5, dtype=torch.int32))
    assert not any("token_age" in name for name in batch_stats(newest, version=5))


def test_percentiles_of_ages_are_ages_that_occur():
    """100 tokens of ages 0 .. 99: half of them are at most 49, 99 of them at most 98."""
    versions, mask = -torch.arange(100, dtype=torch.int32), torch.ones(100)
    columns = {"versions": versions, "response_mask": mask}
    stats = batch_stats(Batch(torch.zeros(100).long(), torch.tensor([100]), columns), version=0)
    assert (stats["off_policy/token_age/p50"], stats["off_policy/token_age/p99"]) == (49, 98)


def test_nothing_trainable_leaves_token_statistics_out():
    batch = example().with_columns(response_mask=torch.zeros(9))
    stats = batch_stats(batch)
    assert not [name for name in stats if name.startswith("critic/advantages")]
    assert (stats["response_length/max"], stats["prompt_length/max"]) == (0, 5)
    empty = Batch(torch.zeros(0).long(), torch.zeros(0).long(), {"response_mask": torch.zeros(0)})
    assert batch_stats(empty) == {}


def test_std_and_explained_variance_over_micro_batches_equal_numpy():
    g = torch.Generator().manual_seed(0)
    n = 300
    x = 1 + 1e-4 * torch.randn(n, generator=g)  # a spread that float32 sums of squares would lose
    target, weight = torch.randn(n, generator=g) + 5, torch.rand(n, generator=g)
    prediction = target + 0.3 * torch.randn(n, generator=g)
    parts = []
    for places in torch.randperm(n, generator=g).split([1, 99, 150, 50]):
        mask, segments = torch.ones(len(places), dtype=torch.bool), torch.zeros(len(places), dtype=torch.int64)
        tally = Tally(weight[places], mask, segments)
        tally.std("actor/ratio_std", x[places])
        tally.explained_variance("critic/vf_explained_var", prediction[places], target[places])
        tally.mean("actor/mean", x[places])
        parts.append(tally.output(torch.zeros(())).stats)
    out = finalise(merge_stats(parts))

    def variance(a):
        return np.cov(a.double().numpy(), aweights=weight.double().numpy(), ddof=0)

    assert out.keys() == {"actor/ratio_std", "critic/vf_explained_var", "actor/mean"}
    assert out["actor/ratio_std"] == pytest.approx(math.sqrt(variance(x)), rel=1e-6)
    assert out["critic/vf_explained_var"] == pytest.approx(
        1 - variance(target - prediction) / variance(target), rel=1e-6
    )
    assert out["actor/mean"] == pytest.approx(np.average(x.double(), weights=weight.double()), rel=1e-9)


def test_other_kinds_pass_unknown_parts_are_refused_and_a_constant_target_is_not_explained():
    stats = {"a": Stat("mean", 3.0, 2.0), "b": Stat("sum", 3.0), "c": Stat("max", 7.0), "d": Stat("mean", 0.0, 0.0)}
    assert finalise(stats) == {"a": 1.5, "b": 3.0, "c": 7.0, "d": 0.0}
    with pytest.raises(ValueError, match="statistic x came in the parts mean: expected one of mean, square"):
        finalise({"x~mean": Stat("mean", 1.0)})
    parts = {"error_mean": 0.5, "error_square": 1.0, "target_mean": 2.0, "target_square": 4.0}
    assert finalise({f"x~{part}": Stat("mean", value) for part, value in parts.items()}) == {"x": 0.0}


def test_each_number_of_the_rewards_is_a_mean_over_the_samples_that_have_it():
    prompt, completion = Prompt("0-0", [1], ""), Completion([1], [-1.0], "stop", (VersionSpan(0, 0, 1),))
    extras = [
        {"math": 1.0, "judge": 0.5},
        {"math": 0.0, "judge": 0.0},
        {"math": 1.0, "audit_error": 1.0},
        {"reward_error": 1.0},
    ]
    samples = [Sample.of(prompt, completion, 1.0, extra) for extra in extras]
    found = reward_stats([samples[:2], samples[2:]])
    shares = {"reward/reward_error": 0.25, "reward/audit_error": 0.25}
    assert found == {"reward/math": pytest.approx(2 / 3), "reward/judge": 0.25, **shares}
    assert reward_stats([]) == {}


def test_lengths_and_rewards_are_those_of_samples_and_rows_are_counted_where_there_are_several():
    mask = torch.tensor([0, 0, 1, 1] + [0, 0, 0, 1, 0, 1] + [0, 1], dtype=torch.float32)
    columns = {"response_mask": mask, "token_level_rewards": mask}
    batch = Batch(torch.arange(12), torch.tensor([4, 6, 2]), columns, {}, torch.tensor([2, 1]))
    found = batch_stats(batch)
    assert (found["prompt_length/mean"], found["prompt_length/max"]) == (1.5, 2)
    assert (found["response_length/max"], found["response_length/min"]) == (2 + 3, 1)
    assert (found["critic/rewards/max"], found["critic/rewards/min"]) == (4, 1)
    assert (found["rows/mean"], found["rows/max"], found["rows/min"]) == (1.5, 2, 1)
    assert not any(name.startswith("rows/") for name in batch_stats(batch.by_row()))
