r"""What a text says in the end, as the built-in rewards read it: by this answers to one prompt vote (maj@N).

A reward of a user says it itself: {"score": 1.0, "pred": "46"}.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megarl.rewards.functions.auto import reward_of
from megarl.rewards.functions.boxes import last_box
from megarl.rewards.functions.choice import chosen_letter
from megarl.rewards.functions.gsm8k import final_number, marked_number
from megarl.rewards.result import RewardResult
from megarl.sample import Completion, Prompt


def last_boxed(text: str) -> str | None:
    """The content of the last box, without spaces; None if there is none."""
    found = last_box(text)
    return None if found is None else "".join(found.split())


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
