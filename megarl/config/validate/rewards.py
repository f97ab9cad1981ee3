"""Checks of rewards: their names, weights and services."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.config import names
from megarl.config.schema import Config
from megarl.config.settings import show


def names_of(config: Config) -> dict[str, str]:
    """The rewards of a run, each with the short name under which it is weighted and logged."""
    reward = config.reward
    return {fn: fn.rpartition(":")[2] for fn in [*reward.fn, *reward.by_data_source.values()]}


def contradictions(config: Config) -> Iterator[str]:
    """One sentence for each fault."""
    reward, short = config.reward, names_of(config)
    for fn in reward.fn:
        yield from _no_such(config, "reward.fn", fn)
    for source, fn in reward.by_data_source.items():
        yield from _no_such(config, f"reward.by_data_source.{source}", fn)
    if len(set(reward.fn)) < len(reward.fn):
        yield f"reward.fn={show(reward.fn)}: expected each reward once; reward.weights says how much it counts"
    for fn, name in short.items():
        same = [other for other, its in short.items() if its == name and other != fn]
        if same:
            yield f"reward.fn: {fn} and {same[0]} are both called {name} in the log; expected functions of two names"
    unknown = [name for name in reward.weights if name not in short.values()]
    if unknown:
        yield f"reward.weights.{unknown[0]}: expected one of the rewards {', '.join(short.values())}"


def _no_such(config: Config, key: str, fn: str) -> Iterator[str]:
    place, colon, _ = fn.rpartition(":")
    if not colon and fn not in names.REWARDS and not config.algorithm.plugins:
        wanted = f"expected one of {', '.join(names.REWARDS)}, path/to/file.py:function, or a name that a file in "
        yield f"{key}={fn}: {wanted}algorithm.plugins registers"
    if place.endswith(".py") and not Path(place).expanduser().is_file():
        yield f"{key}={fn}: expected a file that exists, as path/to/file.py:function"
