"""Any valid values of any keys, over any recipe or model: a configuration that reads back as itself, or a refusal.

Each value is one that its key allows alone: one of its choices, a number in its range, a text or a list of its type.
Together they may be refused, but only by sentences that name a key.
"""

import re
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import pytest
import yaml
from bad_input import Cases, examples, nested, read_refusal
from config_helpers import BASE, DENSE, EXPERTS, KEYS
from hypothesis import given
from hypothesis import strategies as st

from megarl.config import ConfigError, layout_names, load_config, preset_names, read_yaml, recipe_names, to_yaml
from megarl.config.keys import entry_groups, entry_types, general, groups, mapping_of, schema_keys, type_of
from megarl.config.settings import show

TEACHER = "t"
ALL_KEYS = [
    *(key for key in KEYS if key not in entry_groups()),
    *(key.replace("NAME", TEACHER) for key in entry_types()),
]

INTEGERS = (-1, 0, 1, 2, 3, 4, 6, 8, 12, 16, 30, 64, 100, 256, 1000, 4096, 30000)
FLOATS = (0.0, 1e-8, 1e-6, 1e-3, 0.01, 0.1, 0.2, 0.5, 0.9, 0.95, 0.999, 1.0, 1.5, 2.0, 3.0, 6.0, 30.0, 600.0)
TEXTS = ("a", "some words", "auto", "org/name", "name-1.0", "dir/file.jsonl", "é")
LISTS: tuple[list[Any], ...] = ([], ["a"], ["a", "b"], ["exact"], ["all-linear"], [0], [1, 3], [0.9, 0.95])
MAPPINGS: tuple[dict[str, Any], ...] = ({}, {"a": 1.0}, {"a": 0.5, "b": 2.0}, {"beta": 0.1})


def values(key: str) -> list[Any]:
    """Those that the key allows, as a file or a command line has them; null where it may be."""
    name = general(key)
    kind = schema_keys()[name].kind
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    choices = schema_keys()[name].record.choices.names
    found: list[Any] = list(choices or ())
    if not choices:
        allowed: Callable[[Any], bool] = limits.test if (limits := schema_keys()[name].range) else lambda value: True
        found = [value for one in kinds for value in of_type(one) if allowed(value)]
    return [*found, None] if NoneType in kinds else found


def of_type(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is list:
        return tuple(one for one in LISTS if all(isinstance(item, get_args(kind)[0]) for item in one))
    if get_origin(kind) is dict:
        number = get_args(kind)[1] is not str
        return MAPPINGS if number else ({}, {"a": "b"})
    return {int: INTEGERS, float: FLOATS, str: TEXTS, bool: (True, False)}.get(kind, ())


@st.composite
def configurations(draw: st.DrawFn) -> tuple[list[str], dict[str, Any], bool]:
    """What lies below, the values that are drawn, and whether they are typed or in a file."""
    preset = st.sampled_from(preset_names())
    below = draw(
        st.sampled_from([[*BASE], [*BASE, DENSE], [*BASE, EXPERTS], [*BASE, "trainer.n_gpus_per_node=8"]])
        | st.sampled_from([[BASE[0], f"recipe={name}"] for name in recipe_names()])
        | preset.map(lambda name: [BASE[0], f"model={name}"])
        | preset.filter(layout_names).flatmap(
            lambda name: st.sampled_from([[BASE[0], f"model={name}", f"layout={one}"] for one in layout_names(name)])
        )
    )
    keys = draw(st.lists(st.sampled_from(ALL_KEYS), min_size=1, max_size=8, unique=True))
    chosen = {key: draw(st.sampled_from(values(key))) for key in keys}
    if any(key.startswith(f"teachers.{TEACHER}.") for key in keys):  # no teacher is one without a model
        chosen.setdefault(f"teachers.{TEACHER}.model.path", "org/name")
    return below, chosen, draw(st.booleans())


def tried(cases: Cases, folder: Path, drawn: tuple[list[str], dict[str, Any], bool]) -> None:
    cases.add()
    below, chosen, is_typed = drawn
    file = folder / "drawn.yaml"
    words = [f"{key}={show(value)}" for key, value in chosen.items()]
    if not is_typed:
        recipe = [word.partition("=")[2] for word in below if word.startswith("recipe=")]
        content = nested(list(chosen.items())) | ({"recipe": recipe[0]} if recipe else {})
        file.write_text(yaml.safe_dump(content, allow_unicode=True))
        below, words = [word for word in below if not word.startswith("recipe=")], [f"recipe={file}"]
    try:
        config, _ = load_config([*below, *words])
    except ConfigError as error:
        sentences = read_refusal(error)
        named = {key for one in sentences for key in re.findall(r"\b[a-z]+(?:\.\w+)+", one)}
        words = [re.match(r"(?:.*: )?(?:recipe|layout|model)=", one) for one in sentences]  # these are no keys
        assert any(words) or any(type_of(key) or mapping_of(key) or key in groups() for key in named), sentences
        return
    file.write_text(to_yaml(config))
    assert read_yaml(file) == config
    again, _ = load_config([f"recipe={file}"])
    assert again == config


@pytest.mark.parametrize("count", [16, pytest.param(100, marks=pytest.mark.full)])
def test_bad_input_valid_values_are_a_configuration_or_a_refusal(cases: Cases, tmp_path: Path, count: int) -> None:
    @examples(count)
    @given(drawn=configurations())
    def each(drawn: tuple[list[str], dict[str, Any], bool]) -> None:
        tried(cases, tmp_path, drawn)

    each()


def test_bad_input_every_key_has_valid_values(cases: Cases) -> None:
    """Else the others would say nothing about it."""
    for key in ALL_KEYS:
        cases.add()
        assert values(key), key
