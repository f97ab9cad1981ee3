"""The description of every key, for `megarl config --help` and docs/configuration.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from megarl.config.aliases import RENAMED, RENAMED_VALUES
from megarl.config.keys import Key, general, nearest, same_keys, schema_keys, type_name
from megarl.config.schema.record import ALL
from megarl.config.settings import ConfigError, show

# The units of numbers, and the ends of their keys; the first match counts.
_UNITS = {
    "optimizer steps": ("lr_warmup_steps", "lr_decay_steps"),
    "seconds": ("_s",),
    "bytes": ("_bytes",),
    "MiB": ("_mb",),
    "sequences": ("micro_batch_size_per_gpu", "sft.batch_size"),
    "prompts": ("batch_size",),
    "tokens": ("_token_len_per_gpu", "_length", "max_total_tokens", "overlong_buffer.len"),
    "iterations": ("_freq", "_steps", "critic_warmup"),
}


@dataclass(frozen=True)
class Description:
    """The documentation of a key."""

    key: str
    kind: str  # such as "an integer or null"
    default: str  # as typed; "= other.key" if it follows another key
    meaning: str
    unit: str  # of a number; "" = none
    allowed: str  # the range of a number, or the names; "" = any
    spellings: tuple[str, ...]  # other keys that mean the same, or "KEY (entry NAME)": one entry of a list or mapping
    only_if: str  # the condition under which it acts; "" = always
    commands: str  # that read it; "" = all
    level: str  # basic, advanced or expert


@cache
def descriptions() -> dict[str, Description]:
    """Every key of a run, in the order of the schema."""
    return {key: _description(key, known) for key, known in schema_keys().items()}


def description(key: str) -> Description:
    """Raises ConfigError if there is no such key."""
    if general(key) not in descriptions():
        near = nearest(key)
        raise ConfigError(f"there is no key {key}" + (f"; did you mean {near}?" if near else ""))
    return descriptions()[general(key)]


def described(word: str) -> list[Description]:
    """A key, all keys of a group, or all with this word in their last name.  Raises ConfigError if there is none."""
    everything = descriptions()
    if general(word) in everything:
        return [description(word)]
    group = [known for name, known in everything.items() if name.startswith(f"{word}.")]
    alike = [known for name, known in everything.items() if word in name.rpartition(".")[2]]
    return group or alike or [description(word)]


def records() -> Iterator[tuple[str, str, list[Description]]]:
    """Keys of one meaning together: their group, their name and their descriptions.

    Example: ("{actor,critic,ref,teachers.NAME}.megatron", "{actor,...}.megatron.param_offload", [...]).
    """
    for (_, name), keys in same_keys().items():
        groups = [key.removesuffix(f".{name}") for key in keys]
        whole = groups[0] if len(groups) == 1 else _braces(groups)
        is_top = keys == [name]
        yield whole, name if is_top else f"{whole}.{name}", [descriptions()[key] for key in keys]


def _braces(groups: list[str]) -> str:
    """Example: ["actor.optim", "critic.optim"] -> "{actor,critic}.optim"."""
    ends = [group.split(".") for group in groups]
    common = 0
    while all(len(end) > common + 1 for end in ends) and len({end[-1 - common] for end in ends}) == 1:
        common += 1
    end = "".join(f".{part}" for part in ends[0][len(ends[0]) - common :])
    return f"{{{','.join(group.removesuffix(end) for group in groups)}}}{end}"


def _description(key: str, known: Key) -> Description:
    return Description(
        key=key,
        kind=type_name(known.kind),
        default=_default(known.default),
        meaning=known.record.help,
        unit=next((unit for unit, ends in _UNITS.items() if key.endswith(ends)), ""),
        allowed=_allowed(key, known) or (known.range.wanted if known.range else ""),
        spellings=tuple(
            other if place is None else f"{other} (entry {place})"
            for other, (ours, place) in RENAMED.items()
            if ours == key
        ),
        only_if=" and ".join(f"({each})" if " or " in each else each for each in known.only_if),
        commands="" if known.commands == ALL else ", ".join(f"megarl {name}" for name in known.commands),
        level=known.record.level,
    )


def _default(value: Any) -> str:
    text = show(value) or "''"
    return f"= {text[2:-1]}" if text.startswith("${") else text


def _allowed(key: str, known: Key) -> str:
    choices = known.record.choices
    others = {ours: other for other, ours in RENAMED_VALUES.get(key, {}).items()}
    names = [f"{name} (or {others[name]})" if name in others else name for name in choices.names]
    return " | ".join([*names, *(["a plug-in's name"] if choices.is_open else [])])
