import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from megarl.rewards.result import RewardResult, to_result


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), torch.tensor(0.5), torch.tensor([0.5]), Fraction(1, 2)])
def test_every_kind_of_number_is_a_reward(value):
    assert to_result(value) == RewardResult(0.5)


def test_truth_and_integers_are_numbers():
    assert to_result(True) == RewardResult(1.0)
    assert to_result(-3) == RewardResult(-3.0)


def test_a_dict_gives_a_score_and_further_numbers():
    got = to_result({"score": 1, "acc": True, "length": np.int64(7), "pred": "46", "parts": [1, 2], "none": None})
    assert got == RewardResult(1.0, {"acc": 1.0, "length": 7.0})
    assert got.pred == "46"


@pytest.mark.parametrize("value", [math.nan, math.inf, {"score": -math.inf}, 1e300, {"score": -3.41e38}])
def test_a_reward_that_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="expected a finite number"):
        to_result(value)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "returned None, a NoneType; expected a number or a dict with 'score'"),
        ("1", "returned '1', a str; expected a number"),
        ([1.0, 2.0], "a list; expected a number"),
        (torch.zeros(2), "a Tensor; expected a number"),
        (np.zeros(2), "a ndarray; expected a number"),
        ({"acc": 1}, r"returned a dict with the keys \['acc'\]; expected 'score' among them"),
        ({"score": "1"}, "returned '1', a str"),
    ],
)
def test_what_is_no_reward_is_named(value, sentence):
    with pytest.raises(TypeError, match=sentence):
        to_result(value)
