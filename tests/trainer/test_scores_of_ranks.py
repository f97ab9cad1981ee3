"""What a reward model on the run's ranks must be, and what its scores do to samples."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from config_helpers import load
from safetensors.torch import load_file, save_file
from tiny_server import make_model, make_reward_model

from megarl.algo.finite import BadNumber
from megarl.sample import Completion, Prompt, Sample, VersionSpan
from megarl.trainer.collectors import make_rewards
from megarl.trainer.reward_model import check_reward_model, scored


def sample(text: str, reward: float, **extra: float) -> Sample:
    completion = Completion([7, 8], [0.0, 0.0], "stop", (VersionSpan(0, 0, 2),), text)
    return Sample.of(Prompt("0-0", [1, 2], "x"), completion, reward, extra)


class Scorer:
    """Gives these scores in turn."""

    weight = 0.5

    def __init__(self, *scores: float) -> None:
        self.left, self.seen = list(scores), list[list[int]]()

    def scores(self, sequences: list[list[int]]) -> list[float]:
        self.seen += sequences
        found, self.left = self.left[: len(sequences)], self.left[len(sequences) :]
        return found


def test_scores_count_with_their_weight_where_the_stand_in_was() -> None:
    model: Any = Scorer(2.0, -4.0)
    groups = [
        [sample("a", 1.0, exact=1.0, model=0.0), sample("b", 0.0, exact=0.0, model=0.0)],
        [sample("c", 3.0, own=3)],
    ]
    (first, second), (other,) = scored(groups, model)
    assert (first.reward, first.reward_extra) == (2.0, {"exact": 1.0, "model": 2.0})
    assert (second.reward, second.reward_extra) == (-2.0, {"exact": 0.0, "model": -4.0})
    assert other is groups[1][0]
    assert model.seen == [[1, 2, 7, 8]] * 2


def test_a_score_that_is_no_number_names_its_sample() -> None:
    model: Any = Scorer(math.nan)
    with pytest.raises(BadNumber, match="the reward model's score of the sample 0-0 is nan; expected a number"):
        scored([[sample("a", 0.0, model=0.0)]], model)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("policy"), seed=1)


@pytest.mark.parametrize("fn", ["model", "[exact,model]"])
def test_the_stand_in_of_collectors_marks_what_is_to_be_scored(policy: str, tmp_path: Path, fn: str) -> None:
    judge = make_reward_model(tmp_path / "judge", seed=2)
    words = (f"reward.fn={fn}", f"reward.model.path={judge}", "reward.model.engine=megatron")
    rewards = make_rewards(load(f"model.path={policy}", *words), 1)(num_workers=0)
    completion = Completion([7], [0.0], "stop", (VersionSpan(0, 0, 1),), "a")
    (outcome,) = asyncio.run(rewards.score(Prompt("0-0", [1], "x", ground_truth="a"), [completion]))
    assert not isinstance(outcome, str)
    exact = {} if fn == "model" else {"exact": 1.0}
    assert (outcome.reward, outcome.extra) == (sum(exact.values()), {**exact, "model": 0.0})


def check(policy: str, judge: str, *, greedy: bool = False) -> None:
    config = load(
        f"model.path={policy}", "reward.fn=model", f"reward.model.path={judge}", "reward.model.engine=megatron"
    )
    algorithm: Any = SimpleNamespace(wants_greedy=greedy)
    check_reward_model(config, algorithm)


def test_a_model_for_ranks_has_one_score_and_the_tokens_of_the_policy(policy: str, tmp_path: Path) -> None:
    judge = make_reward_model(tmp_path / "judge", seed=2)
    check(policy, judge)
    with pytest.raises(ValueError, match="it compares with a greedy completion, which reward.model.engine=megatron do"):
        check(policy, judge, greedy=True)
    with pytest.raises(ValueError, match="it has no score.weight; expected a model for sequence classification"):
        check(policy, policy)
    weights = load_file(tmp_path / "judge" / "model.safetensors")
    two = {**weights, "score.weight": weights["score.weight"].repeat(2, 1)}
    save_file(two, tmp_path / "judge" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"it has score.weight of the shape \[2, \d+\]; expected a model for sequence"):
        check(policy, judge)


def test_a_model_of_other_tokens_needs_a_server(policy: str, tmp_path: Path) -> None:
    judge = make_reward_model(tmp_path / "judge", seed=2)
    file = tmp_path / "judge" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    one, other = [name for name in vocab if len(name) == 1][:2]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    file.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match="its tokenizer has other tokens than that of .*; expected a model of the same"
    ):
        check(policy, judge)
