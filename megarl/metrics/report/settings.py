"""The settings of a run beside the defaults and beside those of another run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

from megarl.config import Config, ConfigError, load_config, resolved
from megarl.config.describe import descriptions
from megarl.config.keys import general
from megarl.config.settings import show

FOLLOWS = "= "  # begins a default that is the value of another key
CHOSEN = "auto"  # a run chooses in its place
OWN = frozenset(("trainer.experiment_name",))  # differ between any two runs


def settings_of(config: Mapping[str, Any], other: Mapping[str, Any]) -> list[dict[str, Any]]:
    """[{"key", "value", "default", "meaning", "changed", "recipe", "own", "other", "differs"}], as in the schema.

    All values are text as YAML has it.  "changed": from the default, what a run makes of it, and the key that it
    follows; "recipe": of the run's recipe, None without one, from which "own" says whether it differs; "other": of the
    other run, None without one or if it lacks the key, from which "differs" says so.
    """
    ours, theirs = dict(_flat(config)), dict(_flat(other))
    recipes = of_recipe(ours.get("trainer.recipe"))
    rows = []
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        known = descriptions().get(general(key))
        default = known.default if known else ""
        value = ours.get(key)
        rows.append(
            {
                "key": key,
                "value": value,
                "default": default,
                "meaning": known.meaning if known else "",
                "changed": known is not None and value is not None and not _is_default(key, value, default, ours),
                "recipe": recipes.get(key),
                "own": key in recipes and value is not None and recipes[key] not in (value, CHOSEN),
                "other": theirs.get(key),
                "differs": bool(theirs) and theirs.get(key) != value and key not in OWN,
            }
        )
    return rows


def of_recipe(name: str | None) -> dict[str, str]:
    """The settings of a recipe, or of a file; {} without one, and if it is not there any more."""
    if name in (None, "null"):
        return {}
    try:
        config, _ = load_config([f"recipe={name}"], command="config")
    except ConfigError:
        return {}
    return dict(_flat(asdict(config)))


def _is_default(key: str, value: str, default: str, values: Mapping[str, str]) -> bool:
    followed = values.get(default.removeprefix(FOLLOWS)) if default.startswith(FOLLOWS) else default
    return value == _resolved_defaults().get(key) or _same(value, followed)


def _same(value: str, other: str | None) -> bool:
    """Also 512 and 512.0."""
    try:
        return value == other or float(value) == float(other or "")
    except ValueError:
        return False


@cache
def _resolved_defaults() -> dict[str, str]:
    """What a run makes of the defaults: a null that stands for another value is that value."""
    return dict(_flat(asdict(resolved(Config()))))


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", show(value) or "''"
