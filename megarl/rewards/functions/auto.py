"""Chooses the built-in reward by the row's data source, as verl does."""

from __future__ import annotations

from functools import cache
from typing import Any

from megarl.rewards import RewardFn, load_reward, register_reward
from megarl.sample import Completion, Prompt

BY_DATA_SOURCE = {
    "openai/gsm8k": "gsm8k_strict",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math": "math_dapo",
    "math_dapo": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
}
BY_BEGINNING = {"aime": "math_dapo", "numina_": "math"}
# What verl scores with functions that do not exist here: `exact` would give these rows 0 for ever.
MISSING = (
    "apps",
    "codecontests",
    "codeforces",
    "hiyouga/geometry3k",
    "searchR1_",
    "taco",
)


@register_reward("auto")
def auto(prompt: Prompt, completion: Completion) -> Any:
    """The built-in reward of the row's data source; `exact` for a source of your own, and for a row without one.

    Raises ValueError for a source that verl scores in a way that is not built in.
    """
    source = prompt.data_source
    if source.startswith(MISSING):
        raise ValueError(f"no built-in reward fits data_source={source}; expected one in reward.by_data_source")
    return _built_in(reward_of(source))(prompt, completion)


def reward_of(source: str) -> str:
    """The name of the built-in reward of a data source.

    >>> reward_of("aime_2024"), reward_of("sums")
    ('math_dapo', 'exact')
    """
    by_beginning = (name for beginning, name in BY_BEGINNING.items() if source.startswith(beginning))
    return BY_DATA_SOURCE.get(source) or next(by_beginning, "exact")


@cache
def _built_in(name: str) -> RewardFn:
    return load_reward(name)
