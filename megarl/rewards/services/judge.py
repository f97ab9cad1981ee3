"""Rewards from other models: a judge, which is asked and whose answer is read, and a reward model on a server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import AutoTokenizer

from megarl.rewards.result import truth_of
from megarl.rewards.services.limit import Limit, ServiceError
from megarl.rewards.services.service import REPLY_BYTES, Service
from megarl.samples.float32 import is_finite
from megarl.samples.sample import Completion, Prompt, line_of, text_of

ROUTE = "/classify"  # of SGLang, which scores the tokens of a conversation
JSON = "json:"  # in front of the name of a field
_LONGEST = 1 << 17  # tokens of an answer where reward.judge.request has no limit
_TOKEN_BYTES = 512  # of a reply for each token of an answer, with its log-prob
_THOUSANDS = re.compile(r",(?=\d{3}(?!\d))")  # of 1,000
_SEARCHED = 20_000  # characters at the end of an answer, for JSON


class Judge:
    """Asks `votes` times for each sample; the reward is the mean of the numbers that could be read.

    Args:
        url: of the endpoint, its version included: "https://api.openai.com/v1".
        prompt: what it is asked, with {question}, {answer} and {truth}.
        read: finds the number in the answer; see reader.
        request: further fields of the request.  Example: {"temperature": 0, "max_tokens": 256}.
        key: of the endpoint; "": it needs none.
    """

    def __init__(
        self,
        url: str,
        model: str,
        prompt: str,
        read: str,
        votes: int,
        request: Mapping[str, Any],
        *,
        limit: Limit,
        key: str = "",
    ) -> None:
        self._service = Service(url, limit, api_key=key)
        self._model = model
        self._prompt = prompt
        self._votes = votes
        self._request = dict(request)
        self._read = reader(read)
        limits = [request.get(name) for name in ("max_completion_tokens", "max_tokens")]
        most_tokens = next((limit for limit in limits if isinstance(limit, int) and limit > 0), _LONGEST)
        self._most_bytes = REPLY_BYTES + _TOKEN_BYTES * most_tokens

    async def __call__(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        """The mean, and with several votes how many of them could be read.  Raises ServiceError if none could."""
        asked = {"role": "user", "content": filled(self._prompt, prompt, completion)}
        body = {"model": self._model, "messages": [asked], **self._request}
        votes = (
            self._service.post("/chat/completions", body, self._number, most_bytes=self._most_bytes)
            for _ in range(self._votes)
        )
        replies = await asyncio.gather(*votes, return_exceptions=True)
        errors = [one for one in replies if isinstance(one, BaseException)]
        numbers = [one for one in replies if not isinstance(one, BaseException)]
        serious = [error for error in errors if not isinstance(error, ServiceError)]
        if serious or not numbers:
            raise (serious or errors)[0]
        score = {"score": sum(numbers) / len(numbers)}
        return score if self._votes == 1 else score | {"votes": float(len(numbers))}

    def _number(self, reply: Any) -> float:
        try:
            text = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise ServiceError(f"the judge's reply has no answer: {str(reply)[:200]}") from None
        number = self._read(text or "")
        if number is None:
            raise ServiceError(f"the judge's answer has no number that reward.judge.read finds: {str(text)[-200:]!r}")
        return number


def filled(template: str, prompt: Prompt, completion: Completion) -> str:
    """The template with the sample's texts.  Other braces stay, and so do those in the texts.

    Raises ValueError for {truth} if the row has none.
    """
    values: dict[str, Callable[[], str]] = {
        "question": lambda: question_of(prompt),
        "answer": lambda: completion.text,
        "truth": lambda: text_of(truth_of(prompt)),
    }
    return re.sub(r"\{(question|answer|truth)\}", lambda match: values[match[1]](), template)


def question_of(prompt: Prompt) -> str:
    """The prompt as text: a string as it is, the content of a single message, else lines of "role: content"."""
    if isinstance(prompt.text, str):
        return prompt.text
    if len(prompt.text) == 1:
        return str(prompt.text[0]["content"])
    return "\n".join(map(line_of, prompt.text))


def reader(read: str) -> Callable[[str], float | None]:
    r"""The function that finds the judge's number in its answer: the last that fits, None without any.

    read: "json:FIELD", a field of a JSON object in the answer; else a regular expression with one group.

    >>> reader(r"Score: (\d+)")("Score: 3? No. Score: 7")
    7.0
    >>> reader("json:score")('Well, {"why": "ok", "score": 0.5}')
    0.5
    """
    if read.startswith(JSON):
        field = read.removeprefix(JSON)
        return lambda text: _last(fields[field] for fields in _objects(text) if field in fields)
    pattern = re.compile(read)
    assert pattern.groups == 1, f"reward.judge.read={read}: expected one group"
    return lambda text: _last(pattern.findall(text.replace("\u2212", "-")))


def _last(values: Any) -> float | None:
    """The last of these values that is a finite number of float32."""
    last = None
    for value in values:
        try:
            number = float(_THOUSANDS.sub("", value) if isinstance(value, str) else value)
        except (TypeError, ValueError):
            continue
        last = number if is_finite(number) else last
    return last


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in the last _SEARCHED characters of a text, outermost only."""
    text = text[-_SEARCHED:]  # each error of the decoder counts the lines before it
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            end = at + 1
        else:
            yield value
        at = text.find("{", end)


class RewardModel:
    """Example: reward = RewardModel("/models/reward", "http://host:30000", limit=Limit(64)).

    Args:
        path: the model's folder or hub name.  Its tokenizer and its chat template write the conversation: the policy's
            tokens mean nothing to it.
        url: of the server; it runs with `--is-embedding`.
        key: of the server; "": it needs none.
        system_prompt, template: as the policy's prompts have them, data.system_prompt and
            data.apply_chat_template_kwargs.
    """

    def __init__(
        self,
        path: str,
        url: str,
        *,
        limit: Limit,
        key: str = "",
        system_prompt: str | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        self._service = Service(url, limit, api_key=key)
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._system_prompt, self._template = system_prompt, template or {}

    async def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """The model's first number.  Raises ServiceError if there is none."""
        return await self._service.post(ROUTE, {"input_ids": self.token_ids(prompt, completion)}, _score_in)

    def token_ids(self, prompt: Prompt, completion: Completion) -> list[int]:
        """The conversation in the model's tokens, as data/pairs.py writes it for the training of such a model.

        Without a chat template these are the texts of prompt and answer, joined, and the token that ends a text.
        """
        if self._tokenizer.chat_template is None:
            question = (
                prompt.text if isinstance(prompt.text, str) else "\n".join(m["content"] or "" for m in prompt.text)
            )
            ids, end = list(self._tokenizer(question + completion.text)["input_ids"]), self._tokenizer.eos_token_id
            return ids if end is None or ids[-1:] == [end] else [*ids, end]
        asked = [{"role": "user", "content": prompt.text}] if isinstance(prompt.text, str) else prompt.text
        if self._system_prompt is not None and all(message["role"] != "system" for message in asked):
            asked = [{"role": "system", "content": self._system_prompt}, *asked]
        messages = [*asked, {"role": "assistant", "content": completion.text}]
        written = self._tokenizer.apply_chat_template(messages, tokenize=False, **self._template)
        return list(self._tokenizer(written, add_special_tokens=False)["input_ids"])  # the template writes them


class ScoredOnRanks:
    """Stands in for a reward model on the run's ranks: 0 until it scores what is trained on.

    Each sample that is to be scored has its number among the extra numbers, as "model": with several rewards that is so
    anyway, and if it `is_alone`, it adds it.
    """

    def __init__(self, *, is_alone: bool, limit: Limit) -> None:
        """It sends no request, so `limit` has no effect."""
        self._result = {"score": 0.0, "model": 0.0} if is_alone else {"score": 0.0}

    async def __call__(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        return self._result


def _score_in(reply: Any) -> float:
    try:
        return float(reply["embedding"][0])
    except (KeyError, IndexError, TypeError, ValueError):
        raise ServiceError(f"the reward model's reply has no score: {str(reply)[:200]}", passes=False) from None
