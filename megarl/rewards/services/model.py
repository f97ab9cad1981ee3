"""Reward from a reward model: a server scores the conversation with the answer, as SGLang's /classify does."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from megarl.rewards.services.limit import Limit, ServiceError
from megarl.rewards.services.service import Service
from megarl.sample import Completion, Prompt

ROUTE = "/classify"


class RewardModel:
    """Example: reward = RewardModel("/models/reward", "http://host:30000", limit=Limit(64)).

    Args:
        path: the model's folder or hub name.  Its tokenizer and its chat template write the conversation: the policy's
            tokens mean nothing to it.
        url: of the server; it runs with `--is-embedding`.
        key: of the server; "": it needs none.
    """

    def __init__(self, path: str, url: str, *, limit: Limit, key: str = "") -> None:
        self._service = Service(url, limit, api_key=key)
        self._tokenizer = AutoTokenizer.from_pretrained(path)

    async def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """The model's first number.  Raises ServiceError if there is none."""
        return await self._service.post(ROUTE, {"input_ids": self.token_ids(prompt, completion)}, _score)

    def token_ids(self, prompt: Prompt, completion: Completion) -> list[int]:
        """The conversation in the model's tokens; without a chat template the texts of prompt and answer, joined."""
        if self._tokenizer.chat_template is None:
            question = (
                prompt.text if isinstance(prompt.text, str) else "\n".join(m["content"] or "" for m in prompt.text)
            )
            return list(self._tokenizer(question + completion.text)["input_ids"])
        asked = [{"role": "user", "content": prompt.text}] if isinstance(prompt.text, str) else prompt.text
        messages = [*asked, {"role": "assistant", "content": completion.text}]
        written = self._tokenizer.apply_chat_template(messages, tokenize=False)
        return list(self._tokenizer(written, add_special_tokens=False)["input_ids"])  # the template writes them


class ScoredOnRanks:
    """Stands in for a reward model on the run's ranks: 0 until it scores what is trained on.

    Each sample that is to be scored has its number among the extra numbers, as "model": with several rewards that is so
    anyway, and if it `is_alone`, it adds it.
    """

    def __init__(self, *, is_alone: bool, limit: Limit) -> None:
        """Nothing is asked, so `limit` has no use."""
        self._result = {"score": 0.0, "model": 0.0} if is_alone else {"score": 0.0}

    async def __call__(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        return self._result


def _score(reply: Any) -> float:
    try:
        return float(reply["embedding"][0])
    except (KeyError, IndexError, TypeError, ValueError):
        raise ServiceError(f"the reward model's reply has no score: {str(reply)[:200]}", passes=False) from None
