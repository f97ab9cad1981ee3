import math

import pytest

from megarl.weights.verify.canary import Canary, disagreement

IDS = (1, 2, 3, 4)
TRAINER = (-1.0, -2.0, -3.0)


def test_answers_like_the_trainers_are_believed() -> None:
    canary = Canary(IDS, TRAINER, tolerance=0.1)
    assert disagreement(canary, {"a": [-1.05, -2.0, -3.0], "b": [-1.0, -1.95, -3.05]}) == {}


def test_a_single_token_that_is_far_off_is_no_alarm() -> None:
    """In bfloat16 an improbable token may be; a tensor in the wrong place moves all."""
    assert disagreement(Canary(IDS, TRAINER, tolerance=0.1), {"a": [-1.0, -2.0, -9.0]}) == {}


@pytest.mark.parametrize("answer", [[-1.0, -2.2, -3.2], [-1.0], [], [-1.0, math.nan, -3.0], [-1.0, -math.inf, -3.0]])
def test_an_answer_unlike_the_trainers_is_named(answer: list[float]) -> None:
    found = disagreement(Canary(IDS, TRAINER, tolerance=0.1), {"a": list(TRAINER), "b": answer})
    assert list(found) == ["b"] and found["b"].startswith("b answers the canary prompt with ")


def test_without_a_trainer_one_of_three_stands_out_and_of_two_neither_is_believed() -> None:
    canary = Canary(IDS, tolerance=0.1)
    same, other = [-1.0, -2.0, -3.0], [-1.0, -2.2, -3.2]
    assert disagreement(canary, {"a": same, "b": same}) == {}
    assert set(disagreement(canary, {"a": same, "b": same, "c": other})) == {"c"}
    assert set(disagreement(canary, {"a": same, "b": other})) == {"a", "b"}
    assert disagreement(canary, {}) == {}


@pytest.mark.parametrize("at", range(3))
def test_a_server_whose_numbers_are_not_finite_condemns_no_other(at: int) -> None:
    answers = [[-1.0, -2.0, -3.0]] * 3
    answers[at] = [-1.0, math.nan, -3.0]
    found = disagreement(Canary(IDS, tolerance=0.1), dict(zip("abc", answers, strict=True)))
    assert found == {"abc"[at]: f"{'abc'[at]} answers the canary prompt with log-probs that are not finite"}


@pytest.mark.parametrize("at", range(3))
def test_where_the_trainers_numbers_are_not_finite_no_server_is_believed(at: int) -> None:
    trainer = [-1.0, -2.0, -3.0]
    trainer[at] = math.nan
    found = disagreement(Canary(IDS, tuple(trainer), tolerance=0.1), {"a": [-1.0, -2.0, -3.0]})
    assert set(found) == {"a"}


def test_a_canary_from_plain_numbers() -> None:
    assert Canary.from_json({"prompt_ids": [1, 2], "log_probs": [-1], "tolerance": 0.5}) == Canary((1, 2), (-1.0,), 0.5)
    assert Canary.from_json({"prompt_ids": [1, 2], "log_probs": None}) == Canary((1, 2))
