"""The settings of a run beside the defaults, and those of several runs beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from megarl.config import Config, ConfigError, load_config, resolved
from megarl.config.describe import descriptions
from megarl.config.keys import general
from megarl.config.settings import show

FOLLOWS = "= "  # begins a default that is the value of another key
CHOSEN = "auto"  # a run chooses in its place
OWN = frozenset(("trainer.experiment_name", "trainer.default_local_dir"))  # differ between any two runs


def settings_of(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """[{"key", "values": of each run, "default", "meaning", "changed", "recipe", "own", "differs"}], as in the schema.

    All values are text as YAML has it, None where a run lacks the key.  "changed": in a run, from the default, what it
    makes of it, and the key that it follows; "recipe": of the first run's recipe, None without one, from which "own"
    says whether a run differs; "differs": between runs that have settings.
    """
    runs = [dict(_flat(config)) for config in configs]
    recipes = of_recipe(runs[0].get("trainer.recipe"))
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run):
        known = descriptions().get(general(key))
        default = known.default if known else ""
        having = [run for run in runs if key in run]
        rows.append(
            {
                "key": key,
                "values": [run.get(key) for run in runs],
                "default": default,
                "meaning": known.meaning if known else "",
                "changed": known is not None and not all(_is_default(key, run[key], default, run) for run in having),
                "recipe": recipes.get(key),
                "own": key in recipes and recipes[key] != CHOSEN and any(run[key] != recipes[key] for run in having),
                "differs": key not in OWN and len({run.get(key) for run in runs if run}) > 1,
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
