"""Finds the function that `reward.fn` names, and adapts it to the arguments (prompt, completion)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megarl.plugins.load import is_async, user_function
from megarl.samples.sample import Completion, Prompt

# Returns a number, or {"score": number, further numbers}; an async function returns an awaitable of that.
RewardFn = Callable[[Prompt, Completion], Any]

SERVICES = ("judge", "model")  # rewards of `services/`, which are made from settings
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
    """Return a function of (prompt, completion) as it is; wrap one with further parameters, or verl's names."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function  # built in C: its arguments are unknown
    if {"solution_str", "solution_strs"} & parameters.keys():
        return _from_verl(fn, function, parameters)
    takes = [parameter.name for parameter in parameters.values() if parameter.kind in _BY_POSITION][:2]
    # Under other names they would be given the wrong values: (completion, truth) would get a prompt and a completion.
    is_ours = all(name.lstrip("_") in (wanted, "") for name, wanted in zip(takes, OUR_ARGUMENTS, strict=False))
    takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    more = [parameter for name, parameter in parameters.items() if name not in takes]
    unknown = [one.name for one in more if one.name not in FURTHER_ARGUMENTS and _waits(one)]
    if not is_ours or unknown or not (takes_any or len(takes) == len(OUR_ARGUMENTS)):
        raise ValueError(
            f"reward.fn={fn}: it takes ({', '.join(parameters)}); expected ({', '.join(OUR_ARGUMENTS)}) "
            f"or ({', '.join(VERL_ARGUMENTS)}){_no_value(unknown if is_ours else [])}"
        )
    # One of (*args, **kwargs) hands them on to a function that may take two.
    has_any = not takes_any and any(parameter.kind is parameter.VAR_KEYWORD for parameter in more)
    further = [name for name in FURTHER_ARGUMENTS if has_any or name in parameters]
    return _with_further(function, further) if further else function


def _waits(parameter: inspect.Parameter) -> bool:
    """Whether the parameter is for a value of the caller: it has no default, or one that says nothing."""
    default = parameter.default
    return _is_required(parameter) or default is None or (isinstance(default, str) and not default)


def _no_value(names: list[str]) -> str:
    wanted = f"; nothing gives {', '.join(names)} a value, a further parameter is one of {', '.join(FURTHER_ARGUMENTS)}"
    return wanted if names else ""


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _adapted(
    function: Callable[..., Any],
    bound: Callable[[Prompt, Completion], Callable[[], Any]],
    read: Callable[[Any], Any] = lambda value: value,
) -> RewardFn:
    """A function with other parameters as one of (prompt, completion).

    `bound`: the function with the arguments of a sample; `read`: makes a score of what it returns.
    """

    async def async_reward(prompt: Prompt, completion: Completion) -> Any:
        return read(await bound(prompt, completion)())

    def reward(prompt: Prompt, completion: Completion) -> Any:
        return read(bound(prompt, completion)())

    adapted = async_reward if is_async(function) else reward
    vars(adapted)["__wrapped__"] = function  # for messages, which say where the user's function is
    return adapted


def _with_further(function: Callable[..., Any], names: Sequence[str]) -> RewardFn:
    """A function of (prompt, completion) and some of FURTHER_ARGUMENTS as one of (prompt, completion)."""

    def bound(prompt: Prompt, completion: Completion) -> Callable[[], Any]:
        further = {name: FURTHER_ARGUMENTS[name](prompt, completion) for name in names}
        return partial(function, prompt, completion, **further)

    return _adapted(function, bound)


def _messages(prompt: Prompt, completion: Completion) -> list[dict[str, Any]]:
    """The whole conversation, the last answer included."""
    if CONVERSATION in prompt.extra:
        return list(prompt.extra[CONVERSATION])
    asked = [{"role": "user", "content": prompt.text}] if isinstance(prompt.text, str) else prompt.text
    return [*asked, {"role": "assistant", "content": completion.text}]


def _extra_info(prompt: Prompt) -> Any:
    """verl's rows have further fields in a column extra_info; other data sets have them at the top level."""
    return prompt.extra.get("extra_info", prompt.extra)


# What a function of (prompt, completion) may take besides, by name.
FURTHER_ARGUMENTS: dict[str, Callable[[Prompt, Completion], Any]] = {
    "messages": _messages,
    "data_source": lambda prompt, _: prompt.data_source,
    "ground_truth": lambda prompt, _: prompt.ground_truth,
    "extra_info": lambda prompt, _: _extra_info(prompt),
}


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

    def bound(prompt: Prompt, completion: Completion) -> Callable[[], Any]:
        row = (prompt.data_source, completion.text, prompt.ground_truth, _extra_info(prompt))
        known = dict(zip(form, row, strict=True))
        return partial(function, **{name: [known[name]] if of_lists else known[name] for name in wanted})

    def only(scores: Any) -> Any:
        if len(scores) != 1:
            raise ValueError(f"returned {len(scores)} scores for a list of one answer; expected one")
        return scores[0]

    return _adapted(function, bound, only) if of_lists else _adapted(function, bound)


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_KEYWORD,
        parameter.VAR_POSITIONAL,
    )
