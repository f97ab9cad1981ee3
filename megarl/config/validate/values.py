"""Checks each value alone: which keys a command needs, and which choices and which range a key has."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import reduce
from typing import Any

from megarl.config.keys import general, schema_keys
from megarl.config.names import SUPERVISED
from megarl.config.resolve import invalid_cuts
from megarl.config.schema import Config
from megarl.config.settings import show
from megarl.config.validate import models, strategies
from megarl.config.validate.layouts import used_roles

SERVED = "rollout.urls"  # of `megarl serve`, which starts these, or such as join a run
NEEDED: dict[str, tuple[str, ...]] = {
    "train": ("model.path", "data.train_files"),
    **dict.fromkeys(SUPERVISED, ("model.path", "sft.train_files")),
    "evaluate": ("model.path", "data.val_files"),
    "serve": ("model.path", SERVED),
}
WANTED = {"model.path": "a Hugging Face folder or hub name"}
WANTED[SERVED] = "at least one http://host:port, or rollout.join with HOST:PORT of a run"


def value_of(config: Config, key: str) -> Any:
    """value_of(config, "actor.optim.lr") -> 1e-6."""
    return reduce(lambda at, name: at[name] if isinstance(at, dict) else getattr(at, name), key.split("."), config)


def is_there(config: Config, key: str) -> bool:
    """Whether the run has the key: a later layer may have taken a teacher away."""
    return general(key) == key or key.split(".")[1] in config.teachers


def missing_values(config: Config, command: str) -> Iterator[str]:
    """One sentence for each key that the command needs and nobody set."""
    for key in NEEDED.get(command, ()):
        if not value_of(config, key) and not (key == SERVED and config.rollout.join):
            yield f"{key} is not set: `megarl {command}` needs {WANTED.get(key, 'at least one file')}"


def invalid_values(config: Config, keys: Collection[str], command: str) -> Iterator[str]:
    """One sentence for each value that is invalid on its own, of the keys that were set: no default is invalid."""
    for key in (key for key in keys if is_there(config, key)):
        value, known = value_of(config, key), schema_keys()[general(key)]
        choices = known.record.choices
        if value is None:
            continue
        if choices.names and value not in choices.names and not (choices.is_open and config.algorithm.plugins):
            more = ", or a name that a file in algorithm.plugins registers" if choices.is_open else ""
            yield f"{key}={value}: expected one of {', '.join(choices.names)}{more}"
        if known.range and not known.range.test(value):
            yield f"{key}={show(value)}: expected {known.range.wanted}"
    for role in ("actor", "critic", "ref", *config.teacher_roles):
        yield from invalid_cuts(config, role)
        yield from strategies.invalid_overrides(config, role)
    yield from models.invalid_numbers(config, ("actor", *used_roles(config, command)))
