"""Finds recipes and presets; a preset has the config.json values of a model, and its layouts for numbers of GPUs.

model: {path: org/Name, dtype: bfloat16, config: {num_hidden_layers: 24, ...}}
layouts:
  8x80: {actor: {megatron: {...}}, trainer: {nnodes: 1, n_gpus_per_node: 8}, rollout: {...}}
"""

from __future__ import annotations

from os.path import exists
from pathlib import Path

import megarl
from megarl.config.keys import nearest
from megarl.config.settings import PRESET, ConfigError, Layer, Setting, from_content, read_yaml

LAYOUTS = "layouts"


def config_dir() -> Path:
    """The folder of shipped configurations: inside an installed package, next to the package in a checkout."""
    package = Path(megarl.__file__).parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(f"{package / 'configs'}: the shipped configurations are missing; install megarl again")


def shipped(kind: str) -> dict[str, Path]:
    """The files of a folder of `configs`, model or recipe, by name."""
    return {path.stem: path for path in sorted((config_dir() / kind).glob("*.yaml"))}


def recipe_names() -> list[str]:
    """The shipped recipes."""
    return list(shipped("recipe"))


def preset_names() -> list[str]:
    """The shipped model presets."""
    return list(shipped("model"))


def read_preset(name: str, layout: str | None) -> list[Layer]:
    """The layers that model=NAME and layout=NAME put under a recipe: the model, then the layout."""
    file = find("model", name)
    content = read_yaml(file)
    layouts = content.pop(LAYOUTS, None) or {}
    layers = [from_content(str(file), content)]
    if layout is not None:
        layers.append(_layout(name, file, layouts, layout))
    for layer in layers:
        for word, value in layer.words.items():
            raise ConfigError(
                f"{file}: {word}={value}: expected no {word} in the preset of a model, which is laid under it"
            )
    told = str(file.resolve()) if is_path(name) else name
    return [*layers, Layer((Setting(PRESET, told, f"model={name}"),), {}, ())]


def layout_names(preset: str) -> list[str]:
    """The layouts that a preset holds, for the word `layout`."""
    return [str(name) for name in read_yaml(find("model", preset)).get(LAYOUTS) or {}]


def find(kind: str, name: str) -> Path:
    """The file that `kind=name` names: one of the shipped ones, or the path of a YAML file."""
    files = shipped(kind)
    expected = f"expected one of {', '.join(files)}, or the path of a YAML file"
    if is_path(name):
        if not exists(name):  # also of what no file can be named, where `Path` raises
            raise ConfigError(f"{kind}={name}: no such file; {expected}")
        return Path(name)
    if name not in files:
        guess = nearest(name, list(files))
        raise ConfigError(f"{kind}={name}: {f'did you mean {guess}? ' if guess else ''}{expected}")
    return files[name]


def is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name


def _layout(name: str, file: Path, layouts: dict[str, dict], layout: str) -> Layer:
    known = {str(key): value for key, value in layouts.items()}
    if layout not in known:
        raise ConfigError(f"layout={layout}: model={name} has no such layout; expected one of {', '.join(known)}")
    return from_content(f"{file}: layout={layout}", known[layout] or {})
