"""From files and a command line to one checked `Config`.

Five layers, each over the one before: the typed schema (configs/train.yaml, composed by Hydra), a preset of a model and
one of its layouts (configs/model), recipes (configs/recipe) and users' files, and the command line.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import megarl
from megarl.config import presets
from megarl.config.keys import FREE
from megarl.config.names import COMMANDS
from megarl.config.presets import find, is_path, read_preset
from megarl.config.resolve import MICRO_BATCH_KEYS, followed_by_roles, settled, to_config
from megarl.config.schema import Config
from megarl.config.settings import ConfigError, Layer, Setting, from_command_line, from_file
from megarl.config.unused_keys import check_effect
from megarl.config.validate.algorithms import advice
from megarl.config.validate.layouts import check_layouts, failing_roles
from megarl.config.validate.strategies import without_shards
from megarl.config.validate.values import check, check_values


def load_config(overrides: list[str], *, command: str = "train") -> tuple[Config, list[str]]:
    """The resolved configuration of a command line, and warnings for whoever typed it.

    overrides: words such as "recipe=quickstart", "recipe=my/file.yaml", "model=NAME", "actor.optim.lr=1e-4".
    command: what it is for: which keys must be given, and which would have no effect, depends on it.
    Raises ConfigError, one sentence, for a key, a type, a value or a combination that cannot be.
    """
    assert command in COMMANDS, f"command {command}: expected one of {COMMANDS}"
    typed = from_command_line(overrides)
    layers = _layers(typed)
    config = _laid(layers)
    check_values(config, command)

    def failing(words: list[str]) -> set[str]:
        """The roles that could not lie over their ranks if these words were typed as well."""
        return failing_roles(_laid([*layers, from_command_line(words)]), command)

    check_layouts(config, command, failing)
    said = [warning for layer in layers for warning in layer.warnings] + without_shards(config, command)
    config = settled(config)
    check(config, command)
    check_effect(config, typed.settings, command)
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
    return list(_shipped("recipe"))


def preset_names() -> list[str]:
    """The shipped presets of models."""
    return list(_shipped("model"))


def layout_names(preset: str) -> list[str]:
    """The layouts that a preset holds, for the word `layout`."""
    return presets.layout_names(_preset_file(preset))


def layout_word(overrides: list[str]) -> str | None:
    """The layout=NAME that a command line comes to, its own or that of its recipe."""
    typed = from_command_line(overrides)
    return _words([*_recipes(typed.recipe), typed]).get("layout")


def to_yaml(config: Config) -> str:
    """Every key, in the order of the schema."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(text: str) -> Config:
    """The Config whose `to_yaml` this is."""
    merged = deepcopy(_base())
    OmegaConf.set_struct(merged, False)  # mappings take names of their own; the schema still refuses other keys
    try:
        merged.merge_with(OmegaConf.create(text))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"this is no configuration of a run: {' '.join(str(error).split())}") from None
    return to_config(merged)


def _layers(typed: Layer) -> list[Layer]:
    """Everything that is laid over the schema, from the bottom to the top."""
    files = _recipes(typed.recipe)
    words = _words([*files, typed])
    model, layout = words.get("model"), words.get("layout")
    if model is not None:
        return [*read_preset(model, _preset_file(model), layout), *files, typed]
    if layout is not None:
        raise ConfigError(f"layout={layout}: expected model=NAME as well, the preset that holds it")
    return [*files, typed]


def _words(layers: list[Layer]) -> dict[str, str]:
    """`model` and `layout` as the last of them says."""
    return {word: value for layer in layers for word, value in layer.words.items()}


def _recipes(recipe: str | None) -> list[Layer]:
    """The recipe that a command line names, and whatever it builds on, from the bottom to the top."""
    files: list[Layer] = []
    seen: set[Path] = set()
    while recipe is not None:
        path = find("recipe", recipe, _shipped("recipe"), "the path of a YAML file")
        if path.resolve() in seen:
            raise ConfigError(f"{path}: expected a recipe that does not lead back to this file")
        seen.add(path.resolve())
        layer = from_file(path)
        files.insert(0, layer)
        for word, name in layer.words.items():
            if word != "layout" and is_path(name):
                layer.words[word] = str(path.parent / name)
        recipe = layer.recipe
    return files


def _shipped(group: str) -> dict[str, Path]:
    """The files of one folder of `configs` by their names."""
    return {path.stem: path for path in sorted((config_dir() / group).glob("*.yaml"))}


def _preset_file(name: str) -> Path:
    return find("model", name, _shipped("model"), "the path of a YAML file")


@cache
def _base() -> DictConfig:
    """What lies under everything; it does not change while a process lives, and composing it is the slowest part."""
    ConfigStore.instance().store(name="schema", node=Config)
    with initialize_config_dir(str(config_dir().resolve()), version_base="1.3"):
        return compose("train")


def _laid(layers: list[Layer]) -> Config:
    """These layers over the schema, each over the one before."""
    composed = deepcopy(_base())
    for layer in layers:
        _lay(composed, layer)
    return followed_by_roles(to_config(composed))


def _lay(config: DictConfig, layer: Layer) -> None:
    """Put the settings of `layer` over `config`, in place."""
    for role, keys in MICRO_BATCH_KEYS.items():
        names = [f"{role}.{key}" for key in keys]
        if any(setting.key in names and setting.value is not None for setting in layer.settings):
            for name in names:  # a new way to cut micro-batches takes the place of the old one
                OmegaConf.update(config, name, None)
    for setting in layer.settings:
        _set(config, setting)


def _set(config: DictConfig, setting: Setting) -> None:
    if setting.key in FREE and setting.place is not None:  # a name of config.json, or a path of them
        OmegaConf.update(config, f"{setting.key}.{setting.place}", setting.value, merge=False, force_add=True)
    elif isinstance(setting.place, str):  # a name of the user's: it may hold dots
        mapping = OmegaConf.select(config, setting.key)
        with open_dict(mapping):
            mapping[setting.place] = setting.value
    else:
        key = setting.key if setting.place is None else f"{setting.key}.{setting.place}"
        OmegaConf.update(config, key, setting.value, merge=False)
