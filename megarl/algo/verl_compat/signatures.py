"""How a function written in verl's documented way is recognised, and what is said where it cannot run."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

# The two sequences that a function is tried on before a run starts; a loss also on long ones, since its denominator may
# have a bound that short ones do not reach.
PROBE_LENGTHS = (3, 5)
LONG_PROBE_LENGTHS = (70, 190)


class RefusedError(ValueError):
    """A sentence about a user's function that is complete as it is."""


def is_documented_loss(function: Callable[..., Any]) -> bool:
    """Ours takes `mask`, theirs `response_mask`."""
    names = inspect.signature(function).parameters
    return "response_mask" in names and "log_probs" in names


def is_documented_estimator(function: Callable[..., Any]) -> bool:
    """Ours has no `dones`: the end of a sequence is the end of its segment."""
    return "dones" in inspect.signature(function).parameters


def accepted(what: str, function: Callable[..., Any], form: Sequence[str]) -> tuple[str, ...]:
    """The names out of `form` that the function takes.  Raises: ValueError for one that it requires beyond these."""
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
    """What the rest of the layer sees of an adapter.  `keywords`: name -> default, Parameter.empty for none."""
    kind = inspect.Parameter
    parameters = [kind(name, kind.POSITIONAL_OR_KEYWORD) for name in positional]
    parameters += [kind(name, kind.KEYWORD_ONLY, default=default) for name, default in keywords.items()]
    if any_keyword:
        parameters.append(kind("args", kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


@contextmanager
def in_one_sentence(what: str, function: Callable[..., Any], hint: str = "") -> Iterator[None]:
    """What a user's function raises becomes a ValueError with its own line; `hint` is for an AttributeError."""
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
    """algorithm.policy_loss_args as the attributes of a documented `config`; remembers what was read."""

    def __init__(self, args: Mapping[str, float]) -> None:
        self._args, self.read = dict(args), set[str]()

    def __getattr__(self, name: str) -> float:
        if name.startswith("_") or name not in self._args:
            raise AttributeError(f"config.{name} is not set, expected a number in algorithm.policy_loss_args.{name}")
        return self.get(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As a mapping has it."""
        self.read.add(name)
        return self._args.get(name, default)
