r"""What a text says in the end, as the built-in rewards read it: by this answers to one prompt vote (maj@N).

A reward of a user says it itself: {"score": 1.0, "pred": "46"}.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megarl.rewards.functions.auto import reward_of
from megarl.rewards.functions.choice import chosen_letter
from megarl.rewards.functions.gsm8k import final_number, marked_number
from megarl.rewards.result import RewardResult
from megarl.sample import Completion, Prompt


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...}, without spaces; None if there is none.

    >>> last_boxed(r"so it is \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    _, mark, rest = text.rpartition(r"\boxed{")
    depth = 1
    for at, character in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return "".join(rest[:at].split())
    return None


READERS: dict[str, Callable[[str], str | None]] = {
    "exact": str.strip,
    "gsm8k": final_number,
    "gsm8k_strict": marked_number,
    "math": last_boxed,
    "choice": chosen_letter,
}


def with_pred(fn: str, prompt: Prompt, completion: Completion, result: RewardResult) -> RewardResult:
    """The result of reward `fn` with the answer that it read; a text without an answer votes for ""."""
    if result.pred is not None:
        return result
    reader = READERS.get(reward_of(prompt.data_source) if fn == "auto" else fn)
    return result if reader is None else replace(result, pred=reader(completion.text) or "")
