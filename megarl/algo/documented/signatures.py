"""Recognises functions in verl's documented form and makes the errors for those that cannot run."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

# Lengths of the two sequences on which a function is tested before a run starts.  A loss is also tested on long ones,
# because its denominator may have a bound that short ones do not reach.
PROBE_LENGTHS = (3, 5)
LONG_PROBE_LENGTHS = (70, 190)


class RefusedError(ValueError):
    """An error about a user's function whose message is already complete."""


def is_documented_loss(function: Callable[..., Any]) -> bool:
    """Our form has `mask`, verl's has `response_mask`."""
    names = inspect.signature(function).parameters
    return "response_mask" in names and ("log_probs" in names or is_of_source(function))


def is_documented_estimator(function: Callable[..., Any]) -> bool:
    """Only verl's forms have `dones` or `token_level_rewards`; in ours a sequence ends with its segment."""
    return "dones" in inspect.signature(function).parameters or is_of_source(function)


def is_of_source(function: Callable[..., Any]) -> bool:
    """Has it the names of verl's source, not those of its documentation?"""
    return bool({"log_prob", "token_level_rewards"} & inspect.signature(function).parameters.keys())


def accepted(what: str, function: Callable[..., Any], form: Sequence[str]) -> tuple[str, ...]:
    """The names of `form` that the function takes.  Raises: ValueError for another required parameter."""
    parameters = inspect.signature(function).parameters.values()
    for p in parameters:
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) or p.default is not p.empty or p.name in form:
            continue
        raise ValueError(f"{what}: there is no value for its parameter {p.name}; expected ({', '.join(form)})")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return tuple(form)
    names = {p.name for p in parameters}
    return tuple(name for name in form if name in names)


def adapted_signature(
    positional: Sequence[str], keywords: Mapping[str, Any], *, any_keyword: bool = False
) -> inspect.Signature:
    """The signature that an adapter shows.  `keywords`: name -> default, Parameter.empty for none."""
    kind = inspect.Parameter
    parameters = [kind(name, kind.POSITIONAL_OR_KEYWORD) for name in positional]
    parameters += [kind(name, kind.KEYWORD_ONLY, default=default) for name, default in keywords.items()]
    if any_keyword:
        parameters.append(kind("args", kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


@contextmanager
def in_one_sentence(what: str, function: Callable[..., Any], hint: str = "") -> Iterator[None]:
    """Turn an exception of a user's function into a ValueError with its line; `hint` is for an AttributeError."""
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", None)
        frame = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
        more = hint if isinstance(error, AttributeError) else ""
        raise ValueError(
            f"{what} fails with {type(error).__name__}: {error}, at {frame.filename}:{frame.lineno}, "
            f"`{frame.line}`{more}"
        ) from error


class Config:
    """algorithm.policy_loss_args as the attributes of a documented `config`; records which were read.

    `more`: values that nobody has to read, of a form whose config has more than these arguments.
    """

    def __init__(self, args: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> None:
        self._args, self.read = {**(more or {}), **args}, set[str]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._args:
            raise AttributeError(f"config.{name} is not set, expected a number in algorithm.policy_loss_args.{name}")
        return self.get(name)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __contains__(self, name: str) -> bool:
        return name in self._args

    def get(self, name: str, default: Any = None) -> Any:
        """As `dict.get`."""
        self.read.add(name)
        return self._args.get(name, default)
