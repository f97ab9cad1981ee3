"""The meaning of every key, from the schema's comments, for `megarl config --help KEY` and docs/configuration.md."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from megarl.config.aliases import RENAMED, RENAMED_VALUES
from megarl.config.keys import NAME, entry_groups, general, nearest, type_name
from megarl.config.schema import Config
from megarl.config.settings import ConfigError, show
from megarl.config.validate.values import CHOICES, OPEN_CHOICES, RANGES

# The unit of a number by the end of its key's name; the first match counts.
_UNITS = (
    ("lr_warmup_steps", "optimizer steps"),
    ("lr_decay_steps", "optimizer steps"),
    ("_s", "seconds"),
    ("_bytes", "bytes"),
    ("_mb", "MiB"),
    ("micro_batch_size", "sequences"),
    ("micro_batch_size_per_gpu", "sequences"),
    ("sft.batch_size", "sequences"),
    ("batch_size", "prompts"),
    ("_token_len_per_gpu", "tokens"),
    ("_length", "tokens"),
    ("max_total_tokens", "tokens"),
    ("overlong_buffer.len", "tokens"),
    ("_freq", "iterations"),
    ("_steps", "iterations"),
    ("critic_warmup", "iterations"),
)


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


@cache
def descriptions() -> dict[str, Description]:
    """Every key of a run, in the order of the schema."""
    return {found.key: found for found in _walk(Config(), "")}


def description(key: str) -> Description:
    """Raises ConfigError if there is no such key."""
    if general(key) not in descriptions():
        near = nearest(key)
        raise ConfigError(f"there is no key {key}" + (f"; did you mean {near}?" if near else ""))
    return descriptions()[general(key)]


def described(key: str) -> list[Description]:
    """A key, or all keys of a group.  Raises ConfigError if there is neither."""
    return [found for name, found in descriptions().items() if name.startswith(f"{key}.")] or [description(key)]


def _walk(node: Any, prefix: str) -> list[Description]:
    kinds, meanings = get_type_hints(type(node)), _meanings(type(node))
    out: list[Description] = []
    for item in fields(node):
        key, value = prefix + item.name, getattr(node, item.name)
        if is_dataclass(value):
            out += _walk(value, f"{key}.")
            continue
        out.append(
            Description(
                key=key,
                kind=type_name(kinds[item.name]),
                default=_default(value),
                meaning=meanings[item.name],
                unit=next((unit for end, unit in _UNITS if key.endswith(end)), ""),
                allowed=_allowed(key),
                spellings=tuple(
                    other if place is None else f"{other} (entry {place})"
                    for other, (ours, place) in RENAMED.items()
                    if ours == key
                ),
            )
        )
        if not prefix and key in entry_groups():
            out += _walk(entry_groups()[key](), f"{key}.{NAME}.")
    return out


def _default(value: Any) -> str:
    text = show(value) or "''"
    return f"= {text[2:-1]}" if text.startswith("${") else text


def _allowed(key: str) -> str:
    if key in CHOICES:
        others = {ours: other for other, ours in RENAMED_VALUES.get(key, {}).items()}
        return " | ".join(f"{name} (or {others[name]})" if name in others else name for name in CHOICES[key])
    if key in OPEN_CHOICES:
        return " | ".join((*OPEN_CHOICES[key], "a plug-in's name"))
    return RANGES[key][1] if key in RANGES else ""


def _meanings(cls: type) -> dict[str, str]:
    """The comments next to the fields of a dataclass; a field with only a new default keeps its base's meaning."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        source = inspect.getsource(base)
        comments = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        body = ast.parse(source).body[0]
        assert isinstance(body, ast.ClassDef), "a dataclass is a class"
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                beside = [comments[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in comments]
                if beside:
                    found[node.target.id] = " ".join(beside)
    return found
