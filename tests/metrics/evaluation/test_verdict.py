"""The verdict of a run beside published figures, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megarl.metrics.evaluation.verdict import band, binomial_error, sentences, verdict

PUBLISHED = {"before": 0.364, "after": 0.567}
SIZES = {"questions": 1319, "of_questions": 1319, "grading": "gsm8k_strict"}


def test_the_bands_of_the_published_gsm8k_run_by_hand() -> None:
    assert (
        binomial_error(0.567, 1319)
        == pytest.approx(math.sqrt(0.567 * 0.433 / 1319))
        == pytest.approx(0.01364, abs=1e-5)
    )
    assert band(0.567, 1319, 1319) == pytest.approx((0.567 - 0.0378, 0.567 + 0.0378), abs=1e-4)
    assert band(0.364, 1319, 1319) == pytest.approx((0.364 - 0.0367, 0.364 + 0.0367), abs=1e-4)
    low, high = band(0.567, 1319, 16)
    assert low < 0.33 and high > 0.80, "few questions say little"


def test_of_exact_repetitions_95_in_100_are_in_the_band() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = rng.binomial(1319, 0.567, size=(2, 4000)) / 1319
    inside = [low <= a <= high for a, p in zip(ours, theirs, strict=True) for low, high in [band(float(p), 1319, 1319)]]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.015)


def test_both_figures_have_to_be_in_their_bands() -> None:
    found = verdict({"before": 0.37, "after": 0.55}, PUBLISHED, **SIZES)
    assert found["reproduced"] and found["before"]["reproduced"] and found["after"]["reproduced"]
    assert sentences(found) == [
        "before: 37.0 ± 1.3 on 1319 questions; published 36.4, reproduced from 32.7 to 40.1: in the band",
        "after: 55.0 ± 1.4 on 1319 questions; published 56.7, reproduced from 52.9 to 60.5: in the band",
        "verdict: reproduced, with answers graded by gsm8k_strict",
    ]
    high = verdict({"before": 0.5, "after": 0.57}, PUBLISHED, **SIZES)
    assert not high["reproduced"] and "above the band" in sentences(high)[0]
    assert sentences(high)[-1] == "verdict: not reproduced, with answers graded by gsm8k_strict"


def test_what_was_not_measured_or_published_is_left_out() -> None:
    alone = verdict({"after": 0.55}, PUBLISHED, **SIZES)
    assert "before" not in alone and alone["reproduced"]
    assert sentences(verdict({}, PUBLISHED, **SIZES)) == [
        "verdict: none, because no accuracy of this run can be compared with a published one"
    ]
