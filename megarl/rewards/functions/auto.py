r"""Chooses the built-in reward by the row's data source, with verl's rules for verl's sources.

Also what a text says in the end, as the built-in rewards read it: by this answers to one prompt vote (maj@N).  A reward
of a user says it itself: {"score": 1.0, "pred": "46"}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from megarl.rewards import RewardFn, load_reward, register_reward
from megarl.rewards.functions.boxes import last_box
from megarl.rewards.functions.choice import chosen_letter
from megarl.rewards.functions.gsm8k import final_number, marked_number, number_of
from megarl.rewards.result import RewardResult, ground_truth_of
from megarl.samples.sample import Completion, Prompt, text_of

BY_DATA_SOURCE = {
    "openai/gsm8k": "gsm8k_verl",
    "gsm8k": "gsm8k",
    "lighteval/MATH": "math_verl",
    "DigitalLearningGmbH/MATH-lighteval": "math_verl",
    "HuggingFaceH4/MATH-500": "math_verl",
    "math": "math_dapo",
    "math_dapo": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
}
NEAREST = "numina_"  # verl scores these with a function that does not exist here
BY_BEGINNING = {"aime": "math_dapo", NEAREST: "math"}
EXACT = "exact"
# What verl scores with functions that do not exist here: `exact` would always give these rows 0.
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
    """The built-in reward of the row's data source; without a known one `gsm8k` for its rows, `exact` for all others.

    Raises ValueError for a source that verl scores in a way that is not built in.
    """
    source = prompt.data_source
    if source.startswith(MISSING):
        raise ValueError(f"no built-in reward fits data_source={source}; expected one in reward.by_data_source")
    return _built_in(reward_of(source, prompt.extra, prompt.ground_truth))(prompt, completion)


@register_reward("exact")
def exact(prompt: Prompt, completion: Completion) -> float:
    """1.0 if both texts are equal after white space around them is removed, else 0.0."""
    return float(completion.text.strip() == ground_truth_of(prompt).strip())


def reward_of(source: str, extra: Mapping[str, Any], truth: Any) -> str:
    """The name of the built-in reward of a row with this data source, these further fields and this ground truth.

    >>> reward_of("aime_2024", {}, "46"), reward_of("", {}, "46"), reward_of("", {"answer": "12 + 34\\n#### 46"}, "46")
    ('math_dapo', 'exact', 'gsm8k')
    """
    by_beginning = (name for beginning, name in BY_BEGINNING.items() if source.startswith(beginning))
    named = BY_DATA_SOURCE.get(source) or next(by_beginning, None)
    return named or ("gsm8k" if _is_gsm8k(extra, truth) else EXACT)


def _is_gsm8k(extra: Mapping[str, Any], truth: Any) -> bool:
    """Whether a field of the row is a solution as GSM8K has them: it ends with `####` and the ground truth's number."""
    marked = [text for text in _texts(extra) if "####" in text]
    return bool(marked) and (number := number_of(text_of(truth))) is not None and number in map(number_of, marked)


def _texts(field: Any) -> Iterator[str]:
    """The texts of a field, and of the mappings in it."""
    if isinstance(field, Mapping):
        for part in field.values():
            yield from _texts(part)
    elif isinstance(field, str):
        yield field


@cache
def _built_in(name: str) -> RewardFn:
    return load_reward(name)


def last_boxed(text: str) -> str | None:
    """The content of the last box, without spaces; None if there is none."""
    box = last_box(text)
    return None if box is None else "".join(box.split())


READERS: dict[str, Callable[[str], str | None]] = {
    "exact": str.strip,
    "gsm8k": final_number,
    "gsm8k_strict": marked_number,
    "gsm8k_verl": marked_number,
    "math": last_boxed,
    "math_verl": last_boxed,
    "choice": chosen_letter,
}


def with_pred(fn: str, prompt: Prompt, completion: Completion, result: RewardResult) -> RewardResult:
    """The result of reward `fn` with the answer that it read; a text without an answer votes for ""."""
    if result.pred is not None:
        return result
    reader = READERS.get(reward_of(prompt.data_source, prompt.extra, prompt.ground_truth) if fn == "auto" else fn)
    return result if reader is None else replace(result, pred=reader(completion.text) or "")
