"""Composes files and a command line into one checked `Config`.

Five layers, each over the previous: the typed schema (configs/train.yaml, composed by Hydra), a model preset and
one of its layouts (configs/model), recipes (configs/recipe) and user files, and the command line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from megarl.config.effect import role_of, without_effect
from megarl.config.keys import entry_groups, general, is_free, leaf_types, type_name
from megarl.config.names import AUTO, COMMANDS, SUPERVISED
from megarl.config.presets import config_dir, find, is_path, read_preset, shipped
from megarl.config.resolve import CUTS, followed_by_roles, settled, to_config
from megarl.config.schema import Config
from megarl.config.settings import PRESET, ConfigError, Faults, Layer, Setting, from_command_line, from_file, show
from megarl.config.settings import read_yaml as read_content
from megarl.config.validate.algorithms import advice
from megarl.config.validate.combinations import contradictions
from megarl.config.validate.generation import advice as advice_on_generation
from megarl.config.validate.layouts import failing_roles, layout_faults
from megarl.config.validate.models import is_here, may_be_hub_name, supervised_lr
from megarl.config.validate.rewards import advice as advice_on_rewards
from megarl.config.validate.servers import advice as advice_on_servers
from megarl.config.validate.strategies import with_local_layers, without_shards
from megarl.config.validate.values import invalid_values, missing_values
from megarl.config.verl.defaults import defaults, differing

LR = "actor.optim.lr"


def load_config(
    overrides: list[str], *, command: str = "train", choose_engine: Callable[[Config], str] | None = None
) -> tuple[Config, list[str]]:
    """The resolved configuration of a command line, and warnings for its user.

    overrides: words such as "recipe=quickstart", "recipe=my/file.yaml", "model=NAME", "actor.optim.lr=1e-4".
    command: determines which keys are required and which would have no effect.
    choose_engine: replaces rollout.engine=auto by the engine of this machine, before the checks that depend on it;
    None: auto stays, and is checked as sglang.
    Raises ConfigError with one sentence for each fault of the first stage that has any: words and files; values;
    layouts; combinations, and keys without effect.
    """
    assert command in COMMANDS, f"command {command}: expected one of {COMMANDS}"
    faults = Faults()
    typed = from_command_line(overrides, command=command)
    layers = _readable_layers(typed, faults)
    layers = [*_verl_defaults(typed, layers), *layers]
    faults.sentences[:0] = [fault for layer in layers for fault in layer.faults]
    faults.stop_if_any()
    config = _laid(layers)
    given = dict.fromkeys(setting.key for layer in layers for setting in layer.settings)
    _stop_if_any([*invalid_values(config, given, command), *missing_values(config, command)], given)
    if choose_engine is not None and config.rollout.engine == AUTO:
        config.rollout.engine = choose_engine(config)
    if "trainer.recipe" not in given:  # the configuration of a run, which is a recipe too, has that of the run
        config.trainer.recipe = typed.words.get("recipe")
    if command in SUPERVISED and LR not in given:
        # DPO begins at a good policy: published rates are a tenth or less of those of supervised training.
        of_adapters = 10 if config.actor.lora.rank else 1
        config.actor.optim.lr = (supervised_lr(config) or 2e-5) * of_adapters * (0.1 if command == "dpo" else 1)

    def failing(words: list[str]) -> set[str]:
        """The roles whose layout would be invalid if these words were added to the command line."""
        return failing_roles(_laid([*layers, from_command_line(words)]), command)

    _stop_if_any(layout_faults(config, command, failing), given)
    warnings = [warning for layer in layers for warning in layer.warnings] + without_shards(config, command)
    warnings += [] if PRESET in given else _sizes_of_presets(config)
    warnings += with_local_layers(config, command)
    settled(config)
    wrong = list(contradictions(config, command))
    unused = list(without_effect(config, typed.settings, command))
    if typed.command.is_whole:  # verl takes such words without a sound
        warnings += unused
    else:
        wrong += unused
    _stop_if_any(wrong, given)
    warnings += [*advice(config), *advice_on_rewards(config), *advice_on_servers(config), *advice_on_generation(config)]
    return config, list(dict.fromkeys(warnings))


def _verl_defaults(typed: Layer, layers: list[Layer]) -> list[Layer]:
    """The layer of verl's defaults below all others, for a command line that is one of verl's."""
    known = {setting.key for layer in layers for setting in layer.settings}
    found = defaults(typed.command, known)
    if not found:
        return []
    told = ", ".join(f"{key}={show(value)}" for key, value in found.items())
    settings = tuple(Setting(key, value, f"{key}={show(value)}") for key, value in found.items())
    line = f"verl's defaults for what the command does not set: {told}"
    return [Layer(settings, {}, (line, *differing(typed.command, known)))]


def _readable_layers(typed: Layer, faults: Faults) -> list[Layer]:
    """All layers above the schema, from bottom to top; a file that cannot be read is among the faults."""
    files: list[Layer] = []
    preset: list[Layer] = []
    with faults.collect():
        files = _recipes(typed.words.get("recipe"))
        preset = _preset(_words([*files, typed]))
    return [*preset, *files, typed]


def _stop_if_any(sentences: Iterable[str], given: Collection[str]) -> None:
    """Raises: ConfigError with all sentences of a stage, but those that repeat the actor's for keys not `given`."""
    settings = {sentence: sentence.partition(": ")[0] for sentence in sentences}  # KEY=VALUE

    def is_repeated(setting: str) -> bool:
        key, actors = setting.partition("=")[0], f"actor{setting.removeprefix(role_of(setting))}"
        return key not in given and actors != setting and actors in settings.values()

    if told := [sentence for sentence, setting in settings.items() if not is_repeated(setting)]:
        raise ConfigError(*told)


def layout_word(overrides: list[str]) -> str | None:
    """The layout=NAME in effect, from the command line itself or from its recipe."""
    typed = from_command_line(overrides)
    return _words([*_recipes(typed.words.get("recipe")), typed]).get("layout")


def to_yaml(config: Config) -> str:
    """Every key, in the order of the schema."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(text: str) -> Config:
    """The Config that `to_yaml` wrote as `text`."""
    merged = deepcopy(_base())
    OmegaConf.set_struct(merged, False)  # mappings accept new names; the schema still refuses unknown keys
    try:
        merged.merge_with(OmegaConf.create(text))
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"this is no configuration of a run: {_fault(error, text)}") from None
    return to_config(merged)


def _fault(error: Exception, text: str) -> str:
    """What is wrong with a text that `to_yaml` did not write, with the key and its value where they are known."""
    key = getattr(error, "full_key", None)
    if key in leaf_types():
        value = OmegaConf.select(OmegaConf.create(text), key)
        return f"{key}={show(value)}: expected {type_name(leaf_types()[key])}"
    if isinstance(error, ConfigKeyError):
        return f"{key}: expected a key of this version"
    return " ".join(str(error).split())


def read_yaml(file: Path) -> Config:
    """The Config in the config.yaml of a run.

    Raises ConfigError, naming file and key, for what this version does not understand.
    """
    try:
        return from_yaml(file.read_text())
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: {error}; another version of megarl may have written it: correct it by docs/configuration.md, "
            "or begin a new run (trainer.resume_mode=disable, or another trainer.experiment_name)"
        ) from None


def _preset(words: dict[str, str]) -> list[Layer]:
    """The layers of the model that these words name."""
    model, layout = words.get("model"), words.get("layout")
    if model is not None:
        return read_preset(model, layout)
    if layout is not None:
        raise ConfigError(f"layout={layout}: expected model=NAME as well, the preset that holds it")
    return []


def _words(layers: list[Layer]) -> dict[str, str]:
    """The words of all layers; the last layer wins."""
    return {word: value for layer in layers for word, value in layer.words.items()}


def _recipes(recipe: str | None) -> list[Layer]:
    """The recipe that a command line names and the recipes below it, from bottom to top."""
    files: list[Layer] = []
    seen: set[Path] = set()
    while recipe is not None:
        path = find("recipe", recipe)
        if path.resolve() in seen:
            raise ConfigError(f"{path}: expected a recipe that does not lead back to this file")
        seen.add(path.resolve())
        layer = from_file(path)
        files.insert(0, layer)
        for word, name in layer.words.items():
            if word != "layout" and is_path(name):
                layer.words[word] = str(path.parent / name)
        recipe = layer.words.get("recipe")
    return files


@cache
def _base() -> DictConfig:
    """The schema with its defaults.  Cached: it never changes, and composing it is the slowest part."""
    ConfigStore.instance().store(name="schema", node=Config)
    with initialize_config_dir(str(config_dir().resolve()), version_base="1.3"):
        return compose("train")


def _laid(layers: list[Layer]) -> Config:
    """These layers over the schema, each over the previous."""
    composed = deepcopy(_base())
    for layer in layers:
        _lay(composed, layer)
    return _with_known_sizes(followed_by_roles(to_config(composed)))


def _with_known_sizes(config: Config) -> Config:
    """Models that are not here, and are those of presets by their hub names, get the presets' numbers."""
    for node in _models(config):
        if not node.config and node.path in _presets_of_hub() and not is_here(node.path):
            node.config = dict(_presets_of_hub()[node.path][1])
    return config


def _sizes_of_presets(config: Config) -> list[str]:
    """A line for each model whose numbers are those of a preset that nobody named."""
    found = dict.fromkeys(node.path for node in _models(config) if node.path in _presets_of_hub())
    absent = [path for path in found if not is_here(path)]
    return [
        f"{path}: its config.json is not here; model={_presets_of_hub()[path][0]} has its numbers" for path in absent
    ]


def _models(config: Config) -> Iterable[Any]:
    return (config.model, config.critic.model, config.ref.model, *(t.model for t in config.teachers.values()))


@cache
def _presets_of_hub() -> dict[str, tuple[str, dict[str, Any]]]:
    """Hub name -> the preset of that model, and its numbers of config.json."""
    models = {name: read_content(file)["model"] for name, file in shipped("model").items()}
    return {model["path"]: (name, model["config"]) for name, model in models.items() if may_be_hub_name(model["path"])}


def _lay(config: DictConfig, layer: Layer) -> None:
    """Put the settings of `layer` over `config`, in place."""
    for setting in layer.settings:
        _add_entry(config, setting.key)
    for role in ("actor", "critic", "ref", *(f"teachers.{name}" for name in config.teachers)):
        names = [f"{role}.{key}" for key in CUTS]
        if any(setting.key in names and setting.value is not None for setting in layer.settings):
            for name in names:  # a new micro-batch limit replaces the old one
                OmegaConf.update(config, name, None)
    for setting in layer.settings:
        _add_entry(config, setting.key)  # again: a setting before may have emptied the mapping
        _set(config, setting)


def _add_entry(config: DictConfig, key: str) -> None:
    """If the key is one of an entry that is not there yet, add the entry, with its defaults."""
    mapping, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    if general(key) != key and name not in config[mapping]:
        if not re.fullmatch(r"\w[\w-]*", name):
            raise ConfigError(f"{mapping}.{name}: expected a name of letters, digits, _ and -")
        with open_dict(config[mapping]):
            config[mapping][name] = OmegaConf.structured(entry_groups()[mapping])


def _set(config: DictConfig, setting: Setting) -> None:
    if is_free(setting.key):
        below = OmegaConf.to_container(OmegaConf.select(config, setting.key), resolve=False)
        OmegaConf.update(config, setting.key, _merged(below, setting.value), merge=False)
    elif isinstance(setting.place, str):  # a name chosen by the user; it may contain dots
        mapping = OmegaConf.select(config, setting.key)
        with open_dict(mapping):
            mapping[setting.place] = setting.value
    else:
        key = setting.key if setting.place is None else f"{setting.key}.{setting.place}"
        OmegaConf.update(config, key, setting.value, merge=False)


def _merged(below: Any, above: Any) -> Any:
    """The names of `above` over those of `below`, in their mappings too; an empty mapping leaves nothing."""
    if not (isinstance(below, dict) and isinstance(above, dict) and above):
        return above
    return below | {name: _merged(below.get(name), value) for name, value in above.items()}
