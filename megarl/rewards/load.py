"""Finds the function that `reward.fn` names, and adapts it to the arguments (prompt, completion)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megarl.plugins import is_async, user_function
from megarl.sample import Completion, Prompt

# Returns a number, or {"score": number, further numbers}; an async function returns an awaitable of that.
RewardFn = Callable[[Prompt, Completion], Any]

CONVERSATION = "conversation"  # the field of Prompt.extra with the messages of an episode, for its reward

OUR_ARGUMENTS = ("prompt", "completion")
# verl's documented signature: compute_score(data_source, solution_str, ground_truth, extra_info=None)
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
# That of reward_manager=batch, each a list; scores come back as a list.
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def resolve(fn: str, table: Mapping[str, str | RewardFn]) -> RewardFn:
    """Find and adapt the function.  `table`: addresses of short names, or functions that a plug-in registered.

    Raises ValueError of one sentence: unknown name, missing file, failing import, no such function, other arguments.
    """
    address = table.get(fn, fn)
    if not isinstance(address, str):
        return _adapt(fn, address)
    place, colon, name = address.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(f"reward.fn={fn}: expected one of {', '.join(table)}, or path/file.py:function")
    return _adapt(fn, user_function(f"reward.fn={fn}", address))


def _adapt(fn: str, function: Callable[..., Any]) -> RewardFn:
    """Return a function of (prompt, completion) as it is; wrap one with `messages`, or verl's parameter names."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function  # built in C: its arguments are unknown
    if {"solution_str", "solution_strs"} & parameters.keys():
        return _wrapping(function, _from_verl(fn, function, parameters))
    needed = [name for name, parameter in parameters.items() if _is_required(parameter) and name != "messages"]
    takes = [parameter.name for parameter in parameters.values() if parameter.kind in _BY_POSITION][:2]
    # Under other names they would be given the wrong values: (completion, truth) would get a prompt and a completion.
    is_ours = all(name.lstrip("_") in (wanted, "") for name, wanted in zip(takes, OUR_ARGUMENTS, strict=False))
    takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    if not is_ours or not set(needed) <= set(takes) or not (takes_any or len(takes) == len(OUR_ARGUMENTS)):
        raise ValueError(
            f"reward.fn={fn}: it takes ({', '.join(parameters)}); expected ({', '.join(OUR_ARGUMENTS)}) "
            f"or ({', '.join(VERL_ARGUMENTS)})"
        )
    return _wrapping(function, _with_messages(function)) if "messages" in parameters else function


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _wrapping(function: Callable[..., Any], adapted: RewardFn) -> RewardFn:
    """For messages, which say where the user's function is."""
    vars(adapted)["__wrapped__"] = function
    return adapted


def _with_messages(function: Callable[..., Any]) -> RewardFn:
    """A function of (prompt, completion, messages) as one of (prompt, completion)."""

    async def async_reward(prompt: Prompt, completion: Completion) -> Any:
        return await function(prompt, completion, messages=_messages(prompt, completion))

    def reward(prompt: Prompt, completion: Completion) -> Any:
        return function(prompt, completion, messages=_messages(prompt, completion))

    return async_reward if is_async(function) else reward


def _messages(prompt: Prompt, completion: Completion) -> list[dict[str, Any]]:
    """The whole conversation, the last answer included."""
    if CONVERSATION in prompt.extra:
        return list(prompt.extra[CONVERSATION])
    asked = [{"role": "user", "content": prompt.text}] if isinstance(prompt.text, str) else prompt.text
    return [*asked, {"role": "assistant", "content": completion.text}]


def _from_verl(fn: str, function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> RewardFn:
    """A function of one completion, or of lists, which here have one element, as one of (prompt, completion)."""
    of_lists = "solution_strs" in parameters
    form = BATCH_ARGUMENTS if of_lists else VERL_ARGUMENTS
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    wanted = [name for name in form if takes_any or name in parameters]
    needed = [name for name, parameter in parameters.items() if _is_required(parameter)]
    unknown = [name for name in needed if name not in form]
    if unknown:
        raise ValueError(f"reward.fn={fn}: no value for {', '.join(unknown)}; expected ({', '.join(form)})")

    def values(prompt: Prompt, completion: Completion) -> dict[str, Any]:
        # verl's rows have further fields in a column extra_info; other data sets have them at the top level.
        extra = prompt.extra.get("extra_info", prompt.extra)
        known = dict(zip(form, (prompt.data_source, completion.text, prompt.ground_truth, extra), strict=True))
        return {name: [known[name]] if of_lists else known[name] for name in wanted}

    def score_of(found: Any) -> Any:
        if not of_lists:
            return found
        if len(found) != 1:
            raise ValueError(f"returned {len(found)} scores for a list of one answer; expected one")
        return found[0]

    async def async_reward(prompt: Prompt, completion: Completion) -> Any:
        return score_of(await function(**values(prompt, completion)))

    def reward(prompt: Prompt, completion: Completion) -> Any:
        return score_of(function(**values(prompt, completion)))

    return async_reward if is_async(function) else reward


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_KEYWORD,
        parameter.VAR_POSITIONAL,
    )
