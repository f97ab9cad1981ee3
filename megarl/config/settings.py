"""One layer of settings: what a command line or a user's file says, in our own names, each key and type checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megarl.config.aliases import FSDP, FSDP_WARNING, canonical
from megarl.config.errors import ConfigError
from megarl.config.keys import fits, followed, groups, leaf_types, mapping_of, nearest, type_name

RECIPE = "recipe"  # not a key of the configuration: it names the file that the rest is laid over


@dataclass(frozen=True)
class Setting:
    """Example: Setting("actor.optim.betas", 0.95, "actor_rollout_ref.actor.optim.beta2=0.95", 1)."""

    key: str  # our own name
    value: Any
    text: str  # as the user wrote it, for messages
    place: int | str | None = None  # the entry of a list or mapping that is set, rather than the whole


@dataclass(frozen=True)
class Layer:
    """Everything that one command line or one file says."""

    settings: tuple[Setting, ...]
    recipe: str | None  # what it is laid over
    warnings: tuple[str, ...]


def show(value: object) -> str:
    """A value as YAML spells it: null, true, 0.1, [a, b]."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(show(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {show(item)}' for name, item in value.items())}}}"
    return str(value)


def from_command_line(overrides: list[str]) -> Layer:
    """`key=value` words, in Hydra's grammar; `+key=value` and `++key=value` are the same as `key=value`."""
    return _layer([(word, *_parse(word)) for word in overrides])


def from_file(path: Path) -> Layer:
    """A user's YAML file.  Its key `recipe` names what it is laid over: a shipped recipe or another file."""
    try:
        loaded = OmegaConf.load(path)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: cannot be read as YAML ({' '.join(str(error).split())})") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: want groups of keys such as `actor:` at the top of the file, not a list")
    content = OmegaConf.to_container(loaded, resolve=False)
    assert isinstance(content, dict), "a DictConfig becomes a dict"
    if "defaults" in content:
        raise ConfigError(f"{path}: want `recipe: NAME` rather than a `defaults` list, to build on another file")
    return _layer([(f"{path}: {key}={show(value)}", str(key), value) for key, value in _flat(content, "")])


def _parse(word: str) -> tuple[str, Any]:
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        raise ConfigError(f"{word}: want key=value, with quotes around a value that has special characters") from None
    if override.type == OverrideType.DEL or override.is_sweep_override():
        raise ConfigError(f"{word}: want key=value with one value; a list is written [a,b]")
    return override.key_or_group, override.value()


def _flat(content: dict[Any, Any], prefix: str) -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for name, value in content.items():
        key = f"{prefix}{name}"
        out += _flat(value, f"{key}.") if isinstance(value, dict) and value else [(key, value)]
    return out


def _layer(written: list[tuple[str, str, Any]]) -> Layer:
    settings: list[Setting] = []
    warnings: list[str] = []
    recipes: list[str] = []
    for text, name, value in written:
        for key, leaf in _flat({name: value}, ""):
            if key == RECIPE:
                recipes.append(_recipe(text, leaf))
                continue
            found = canonical(key)
            if isinstance(found, str):
                warnings.append(found)
                continue
            setting = _checked(Setting(found.key, leaf, text, found.place))
            if setting.key.endswith(".strategy") and setting.value == FSDP:
                warnings.append(f"{text} {FSDP_WARNING}")
                setting = Setting(setting.key, "megatron", text)
            settings.append(setting)
    if len(recipes) > 1:
        raise ConfigError(f"recipe={recipes[-1]}: want one recipe, and recipe={recipes[0]} is already given")
    return Layer(tuple(settings), recipes[0] if recipes else None, tuple(warnings))


def _recipe(text: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{text}: want the name of a recipe or the path of a YAML file")
    return value


def _checked(setting: Setting) -> Setting:
    """The same setting in the form that its type wants, or an error of one sentence."""
    key, value = setting.key, setting.value
    if (mapping := mapping_of(key)) is not None:
        return _checked(Setting(mapping, value, setting.text, key.removeprefix(f"{mapping}.")))
    if key not in leaf_types():
        raise ConfigError(f"{setting.text}: {_unknown(key)}")
    wanted = leaf_types()[key]
    if setting.place is not None:
        kind = get_args(wanted)[-1]  # of a list's elements, of a mapping's values
        if not fits(value, kind):
            raise ConfigError(f"{setting.text}: want {type_name(kind)}")
        return setting
    if value is None and key in followed():
        value = followed()[key]
    elif wanted == list[str] and isinstance(value, str):
        value = [value]
    elif key == "actor.clip_ratio_c" and value is False:
        value = "off"  # YAML reads a bare off as false
    if not fits(value, wanted):
        raise ConfigError(f"{setting.text}: want {type_name(wanted)}")
    if isinstance(value, int) and float in get_args(wanted):
        value = float(value)  # OmegaConf does not turn 3 into 3.0 where text is allowed too
    return Setting(key, value, setting.text)


def _unknown(key: str) -> str:
    if key in groups():
        return f"{key} is a group of keys; want {key}.NAME=VALUE"
    guess = nearest(key)
    hint = f"; did you mean {guess}?" if guess else "; `megarl config` prints them all"
    return f"there is no key {key}{hint}"
