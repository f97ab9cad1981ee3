"""A reward model that scores on the run's ranks: what it must be, and the rewards of samples with its scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megarl.algo.finite import BadNumber
from megarl.config import Config
from megarl.config.validate.models import config_of_folder
from megarl.data.chat import load_tokenizer
from megarl.float32 import is_finite
from megarl.roles.reward_model import RewardModel
from megarl.sample import Sample
from megarl.trainer.algorithm import Algorithm
from megarl.trainer.build import model_folder
from megarl.weights.hf.folder import open_hf

NAME = "model"  # of this reward
_HEAD = "score.weight"


def check_reward_model(config: Config, algorithm: Algorithm) -> None:
    """Raises ValueError for a model that has no head of one score or another vocabulary than the policy.

    It gets the policy's tokens, so both must mean the same by each of them.
    """
    if not config.scores_on_ranks:
        return
    key = f"reward.model.path={config.reward.model.path}"
    folder = model_folder(config.reward.model.path or "", "reward.model.path")
    hidden = config_of_folder(folder).get("hidden_size")
    with open_hf(folder) as weights:
        shape = weights.shapes.get(_HEAD)
    if shape != (1, hidden):
        found = f"has {_HEAD} of the shape {list(shape)}" if shape else f"has no {_HEAD}"
        raise ValueError(f"{key}: it {found}; expected a model for sequence classification with one label")
    ours, theirs = (load_tokenizer(path).get_vocab() for path in (model_folder(config.model.tokenizer_path), folder))
    if ours != theirs:
        raise ValueError(
            f"{key}: its tokenizer has other tokens than that of {config.model.tokenizer_path}, which it needs for "
            "reward.model.engine=megatron; expected a model of the same tokenizer, or reward.model.engine=server"
        )
    if algorithm.wants_greedy:
        estimator = f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
        raise ValueError(
            f"{estimator}: it compares with a greedy completion, which reward.model.engine=megatron does not score; "
            "expected reward.model.engine=server"
        )


def scored(groups: Sequence[Sequence[Sample]], model: RewardModel) -> list[list[Sample]]:
    """The groups with the model's scores of their samples added to the rewards, and among the extra numbers.

    It reads the last row of a sample: the prompt and all that the policy wrote, or its view of the end of an episode.
    Samples without its stand-in stay as they are: of data sources with another reward, and episodes with their own.
    Raises BadNumber, naming the sample, for a score that is not finite.
    """
    samples = [sample for group in groups for sample in group if NAME in sample.reward_extra]
    scores = iter(model.scores([sample.rows[-1].token_ids for sample in samples]) if samples else ())
    return [
        [_with(sample, next(scores), model.weight) if NAME in sample.reward_extra else sample for sample in group]
        for group in groups
    ]


def _with(sample: Sample, score: float, weight: float) -> Sample:
    if not is_finite(score):
        raise BadNumber(f"the reward model's score of the sample {sample.prompt.uid} is {score}; expected a number")
    extra = {**sample.reward_extra, NAME: score}
    return replace(sample, reward=sample.reward + weight * score, reward_extra=extra)
