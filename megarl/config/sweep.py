"""Several runs from a command line: `megarl train -m actor.optim.lr=1e-4,3e-4`, in Hydra's grammar."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import FloatRange, Override, Quote, QuotedString, RangeSweep
from hydra.errors import HydraException

from megarl.config.aliases import canonical
from megarl.config.compose import load_config
from megarl.config.schema import Config
from megarl.config.settings import ConfigError, Faults, parse_override, show

PLACE = ("trainer.default_local_dir", "trainer.experiment_name")  # derived for each run from the sweep and its values
_LONGEST_NAME = 120  # of a folder; file systems allow 255 bytes, and files next to it have longer names
_PLAIN = re.compile(r"[^\w.+=,-]+", re.ASCII)


@dataclass(frozen=True)
class SweptRun:
    """Example: SweptRun({"actor.optim.lr": 1e-4}, ("recipe=quickstart", "actor.optim.lr=0.0001", ...), config)."""

    values: Mapping[str, Any]  # of the swept keys, in the order of the command line
    words: tuple[str, ...]  # the arguments of `megarl train` for this run alone
    config: Config


@dataclass(frozen=True)
class _Choice:
    """One of the values of a word.  `key` is our own name; `value` is set only if there are several values."""

    word: str
    key: str
    swept: bool = False
    value: Any = None


def load_sweep(overrides: list[str]) -> list[SweptRun]:
    """Every combination of the values, checked as `megarl train` does; the last key's value varies fastest.

    overrides: as for load_config; a value may also be a list with commas, choice(...) or range(...).  [a,b] and 'a,b'
        are a single value.
    The runs are written to default_local_dir/EXPERIMENT_sweep, each to a folder named after its values.
    Raises ConfigError before anything is started, as load_config does, with the first error of each key.
    """
    written: list[list[_Choice]] = []
    faults = Faults()
    for word in overrides:
        with faults.collect():
            choices = _choices(word)
        if faults.sentences:
            continue
        # a later word wins over several values of the same key; load_config lays others over each other
        written = [each for each in written if not (each[0].swept and each[0].key == choices[0].key)] + [choices]
    faults.stop_if_any()
    swept = [choices[0].key for choices in written if choices[0].swept]
    if not swept:
        raise ConfigError("-m: expected several values of at least one key, such as actor.optim.lr=1e-4,3e-4")
    for key in PLACE:
        if key in swept:
            raise ConfigError(f"{key}: expected one value with -m, the runs' own folders are named after what is swept")
    runs: list[SweptRun] = []
    for chosen in product(*written):
        with faults.collect():
            runs.append(_run(chosen))
    faults.keep_first_of_each_key()
    faults.stop_if_any()
    _require_one_home(runs)
    _require_different(runs)
    return runs


def _choices(word: str) -> list[_Choice]:
    """The words that a word expands to: itself, or key=value for each of its values."""
    override = parse_override(word)
    found = canonical(override.key_or_group)
    key = found.key if found.place is None else f"{found.key}.{found.place}"
    if not override.is_sweep_override():
        return [_Choice(word, key)]
    texts = _values(word, override)
    words = [f"{override.get_key_element()}={text}" for text in texts]
    return [_Choice(each, key, True, parse_override(each).value()) for each in words]


def _values(word: str, override: Override) -> list[str]:
    """Each value as Hydra writes it."""
    sweep = override.value()
    try:
        found = _numbers(sweep) if isinstance(sweep, RangeSweep) else list(override.sweep_string_iterator())
    except (HydraException, ValueError):  # interval and glob cannot be enumerated; a range may have no step
        found = []
    if not found:
        raise ConfigError(f"{word}: expected values that can be counted: a,b or choice(a,b) or range(start,stop,step)")
    return found


def _numbers(sweep: RangeSweep) -> list[str]:
    """start to stop, stop excluded, in decimals: Hydra's range(0.1,0.4,0.1) has 0.30000000000000004, and 0.4 too."""
    ends = (sweep.start, sweep.stop, sweep.step)
    if all(isinstance(end, int) for end in ends):
        return [str(number) for number in sweep.range()]
    return [str(number) for number in FloatRange(*(Decimal(str(end)) for end in ends))]


def _run(chosen: tuple[_Choice, ...]) -> SweptRun:
    """The run of this combination, with its own folder inside the sweep's."""
    words, values = [choice.word for choice in chosen], {choice.key: choice.value for choice in chosen if choice.swept}
    config, _ = load_config(words)
    trainer = config.trainer
    if trainer.nnodes > 1 and not trainer.check_only:
        raise ConfigError(
            f"trainer.nnodes={trainer.nnodes}: expected 1 with -m, a sweep starts its runs on one machine"
        )
    home, name = str(Path(trainer.default_local_dir) / f"{trainer.experiment_name}_sweep"), folder_name(values)
    quoted = [QuotedString(text, Quote.single).with_quotes() for text in (home, name)]
    words += [f"{key}={text}" for key, text in zip(PLACE, quoted, strict=True)]
    placed = replace(trainer, default_local_dir=home, experiment_name=name)
    return SweptRun(values, tuple(words), replace(config, trainer=placed))


def folder_name(values: Mapping[str, Any]) -> str:
    """Example: {"actor.optim.betas": [0.9, 0.99], "rollout.n": 4} -> "actor.optim.betas=0.9_0.99,rollout.n=4".

    Characters that are unsafe in file names are replaced, and long names are cut; a short hash keeps names unique.
    """
    text = ",".join(f"{key}={show(value).strip('[]').replace(', ', '_')}" for key, value in values.items())
    plain = _PLAIN.sub("_", text)
    if plain == text and len(plain) <= _LONGEST_NAME:
        return plain
    return f"{plain[:_LONGEST_NAME]}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _require_one_home(runs: list[SweptRun]) -> None:
    """Raises: ConfigError if a swept value, such as a recipe, sets another default_local_dir or experiment name."""
    homes = sorted({run.config.trainer.default_local_dir for run in runs})
    if len(homes) > 1:
        raise ConfigError(
            f"trainer.experiment_name: the runs would stand in {', '.join(homes)}; expected one name, and one "
            "trainer.default_local_dir, for all of them"
        )


def _require_different(runs: list[SweptRun]) -> None:
    """Raises: ConfigError for two runs with the same settings."""
    seen: dict[str, str] = {}
    for run in runs:
        name = run.config.trainer.experiment_name
        settings = repr(replace(run.config, trainer=replace(run.config.trainer, experiment_name="")))
        if settings in seen:
            raise ConfigError(f"-m: {seen[settings]} and {name} are the same settings, expected each run once")
        seen[settings] = name
