"""Presets (configs/model): the config.json values of a published model, and its layouts for numbers of GPUs.

model: {path: org/Name, dtype: bfloat16, config: {num_hidden_layers: 24, ...}}
layouts:
  8x80: {actor: {megatron: {...}}, trainer: {nnodes: 1, n_gpus_per_node: 8}, rollout: {...}}
"""

from __future__ import annotations

from os.path import exists
from pathlib import Path

from megarl.config.keys import nearest
from megarl.config.settings import PRESET, ConfigError, Layer, Setting, from_content, read_yaml

LAYOUTS = "layouts"


def read_preset(name: str, file: Path, layout: str | None) -> list[Layer]:
    """The layers that model=NAME and layout=NAME put under a recipe: the model, then the layout."""
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


def layout_names(file: Path) -> list[str]:
    """The layouts in a preset."""
    return [str(name) for name in read_yaml(file).get(LAYOUTS) or {}]


def find(kind: str, name: str, files: dict[str, Path], what: str) -> Path:
    """The file that `kind=name` names: one of the shipped ones, or the path of a YAML file."""
    if is_path(name):
        if not exists(name):  # also of what no file can be named, where `Path` raises
            raise ConfigError(f"{kind}={name}: no such file; expected one of {', '.join(files)}, or {what}")
        return Path(name)
    if name not in files:
        guess = nearest(name, list(files))
        meant = f"did you mean {guess}? " if guess else ""
        raise ConfigError(f"{kind}={name}: {meant}expected one of {', '.join(files)}, or {what}")
    return files[name]


def is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name


def _layout(name: str, file: Path, layouts: dict[str, dict], layout: str) -> Layer:
    known = {str(key): value for key, value in layouts.items()}
    if layout not in known:
        raise ConfigError(f"layout={layout}: model={name} has no such layout; expected one of {', '.join(known)}")
    return from_content(f"{file}: layout={layout}", known[layout] or {})
