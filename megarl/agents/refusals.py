"""Refuses requests that cannot be served, such as fields that would give other log-probs than the policy's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megarl.rollout.protocol import SamplingParams


class Refused(Exception):
    """A request that is not served: an HTTP status, a sentence, and OpenAI's `code`."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class OverLimit(Refused):
    """The episode has used up its turns or its tokens: it is over, and is scored as it stands."""

    def __init__(self, message: str) -> None:
        # OpenAI's clients try 429 and 5xx again; agents know this code as the end of what they can say.
        super().__init__(400, message, "context_length_exceeded")


_SAMPLING = ("temperature", "top_p", "top_k")
# Fields that change what is sampled, and the values that do not change it.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "stop": ([], ""),
    "stop_sequences": ([],),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
}
# Fields that change what is returned, or kept elsewhere; and the values that are served.
_SERVED: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "background": (False,),
    "truncation": ("disabled",),
    "thinking": ({"type": "disabled"},),
    "text": ({"format": {"type": "text"}}, {}),
    "reasoning": ({},),
    "include": ([], ["reasoning.encrypted_content"]),
}
# Fields for the provider's own accounts and caches.
_WITHOUT_EFFECT = frozenset(
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"]
)


def check_fields(
    body: Mapping[str, Any], served: Collection[str], run: SamplingParams, training: SamplingParams | None = None
) -> None:
    """Raises Refused with one sentence for a field of the request that cannot be served; null is always allowed.

    `served`: the fields that the route reads.  `run`: how this session samples.  `training`: how others do; an agent
    that always sends these values is served in an evaluation, too, with those of the session.
    """
    same = {name: [getattr(params, name) for params in (run, training or run)] for name in _SAMPLING}
    for name, value in body.items():
        if value is None or name in served or name in _WITHOUT_EFFECT:
            continue
        if name in same:
            if value not in same[name]:
                raise Refused(
                    400,
                    f"{name}={value!r}: the run samples with {name}={same[name][0]}, and the log-probs of other values "
                    "would not be those of the policy; expected no such field, or the run's value",
                )
        elif name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise Refused(
                    400,
                    f"{name}={value!r}: it would change what is sampled, and the log-probs would not be those of the "
                    f"policy; expected no such field, or {_NEUTRAL[name][0]!r}",
                )
        elif name == "seed":
            raise Refused(400, f"seed={value!r}: the run draws a seed for each answer itself; expected no such field")
        elif name not in _SERVED or value not in _SERVED[name]:
            wanted = f"no such field, or {_SERVED[name][0]!r}" if name in _SERVED else f"one of {sorted(served)}"
            raise Refused(400, f"{name}={value!r}: this endpoint does not serve it; expected {wanted}")


def expect(body: Mapping[str, Any], name: str, kind: Any, wanted: str, default: Any = ...) -> Any:
    """A field of the request; without a default it is required.  Raises Refused for another type."""
    value = body.get(name)
    if value is None and default is not ...:
        return default
    if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or value < 1)):
        raise Refused(400, f"{name}={value!r}: expected {wanted}")
    return value


def expect_count(body: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    """A field that is a whole number of at least 1, or absent."""
    number: int | None = expect(body, name, int, "a whole number >= 1", default)
    return number


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: a string, or parts of type text.  Raises Refused for images and the like."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Refused(400, f"{where} has a part of type {kind!r}: expected text")
    return "".join(part["text"] for part in parts)
