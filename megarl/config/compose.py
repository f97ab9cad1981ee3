"""From files and a command line to one checked `Config`.

Hydra composes what is shipped (configs/train.yaml and a recipe over it) on the typed schema; a user's own file is laid
over that, and the command line over everything.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import megarl
from megarl.config.checks import check
from megarl.config.errors import ConfigError
from megarl.config.inert import check_effect
from megarl.config.keys import nearest
from megarl.config.methods import advice
from megarl.config.names import COMMANDS
from megarl.config.resolve import MICRO_BATCH_KEYS, settled, to_config
from megarl.config.schema import Config
from megarl.config.settings import Layer, from_command_line, from_file


def load_config(overrides: list[str], *, command: str = "train") -> tuple[Config, list[str]]:
    """The resolved configuration of a command line, and warnings for whoever typed it.

    overrides: words such as "recipe=quickstart", "recipe=my/file.yaml", "actor.optim.lr=1e-4".
    command: what it is for: which keys must be given, and which would have no effect, depends on it.
    Raises ConfigError, one sentence, for a key, a type, a value or a combination that cannot be.
    """
    assert command in COMMANDS, f"command {command}: want one of {COMMANDS}"
    typed = from_command_line(overrides)
    shipped, files = _under(typed.recipe)
    composed = deepcopy(_compose(shipped))
    for layer in (*files, typed):
        _lay(composed, layer)
    config = settled(to_config(composed))
    check(config, command)
    check_effect(config, typed.settings, command)
    said = [warning for layer in (*files, typed) for warning in layer.warnings]
    return config, list(dict.fromkeys([*said, *advice(config)]))


def config_dir() -> Path:
    """The folder of shipped configurations: inside an installed package, beside the package in a checkout."""
    package = Path(megarl.__file__).parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(f"{package / 'configs'}: the shipped configurations are missing; install megarl again")


def recipe_names() -> list[str]:
    """The shipped recipes."""
    return sorted(path.stem for path in (config_dir() / "recipe").glob("*.yaml"))


def to_yaml(config: Config) -> str:
    """Every key, in the order of the schema."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(text: str) -> Config:
    """The Config whose `to_yaml` this is."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(text))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"this is no configuration of a run: {' '.join(str(error).split())}") from None
    assert isinstance(merged, DictConfig), "a mapping merged into a Config stays one"
    return to_config(merged)


def _under(recipe: str | None) -> tuple[str | None, list[Layer]]:
    """What a recipe is laid over: the shipped recipe at the bottom, and the user's files from the bottom to the top."""
    files: list[Layer] = []
    seen: set[Path] = set()
    while recipe is not None and _is_path(recipe):
        path = Path(recipe)
        if path.resolve() in seen:
            raise ConfigError(f"{path}: want a recipe that does not lead back to this file")
        seen.add(path.resolve())
        layer = from_file(path)
        files.insert(0, layer)
        recipe = layer.recipe
        if recipe is not None and _is_path(recipe):
            recipe = str(path.parent / recipe)
    if recipe is not None and recipe not in recipe_names():
        guess = nearest(recipe, recipe_names())
        meant = f"did you mean {guess}? " if guess else ""
        known = ", ".join(recipe_names())
        raise ConfigError(f"recipe={recipe}: {meant}want one of {known}, or the path of a YAML file")
    return recipe, files


def _is_path(recipe: str) -> bool:
    return recipe.endswith((".yaml", ".yml")) or "/" in recipe


@cache
def _compose(recipe: str | None) -> DictConfig:
    """What is shipped; it does not change while a process lives, and composing it is the slowest part."""
    ConfigStore.instance().store(name="schema", node=Config)
    try:
        with initialize_config_dir(str(config_dir().resolve()), version_base="1.3"):
            return compose("train", overrides=[f"recipe={recipe}"] if recipe else [])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"recipe={recipe}: {' '.join(str(error).split())}") from None


def _lay(config: DictConfig, layer: Layer) -> None:
    """Put the settings of `layer` over `config`, in place."""
    for role, keys in MICRO_BATCH_KEYS.items():
        names = [f"{role}.{key}" for key in keys]
        if any(setting.key in names and setting.value is not None for setting in layer.settings):
            for name in names:  # a new way to cut micro-batches takes the place of the old one
                OmegaConf.update(config, name, None)
    for setting in layer.settings:
        if isinstance(setting.place, str):  # a name of the user's: it may hold dots
            mapping = OmegaConf.select(config, setting.key)
            with open_dict(mapping):
                mapping[setting.place] = setting.value
            continue
        key = setting.key if setting.place is None else f"{setting.key}.{setting.place}"
        OmegaConf.update(config, key, setting.value, merge=False)
