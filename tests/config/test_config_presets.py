"""The words `model` and `layout`: what a preset lays under recipes, files and the command line."""

import re
from pathlib import Path

import pytest
from config_helpers import BASE, refusal

from megarl.config import config_dir, layout_names, load_config, preset_names, to_yaml
from megarl.config.presets import find

PRESET = """
model:
  path: org/Tiny
  dtype: bfloat16
  config: &numbers {num_hidden_layers: 12, num_attention_heads: 8, rope_scaling: {factor: 2.0}}
layouts:
  1x80: {}
  8x80: &eight
    actor: {megatron: {tensor_model_parallel_size: 4}}
    trainer: {nnodes: 1, n_gpus_per_node: 8}
    rollout: {engine: sglang, tensor_model_parallel_size: 2}
  16x80:
    <<: *eight
    trainer: {nnodes: 2, n_gpus_per_node: 8}
"""


@pytest.fixture
def preset(tmp_path: Path) -> str:
    file = tmp_path / "tiny.yaml"
    file.write_text(PRESET)
    return str(file)


def recipe(folder: Path, text: str, name: str = "r.yaml") -> str:
    (folder / name).write_text(text)
    return f"recipe={folder / name}"


def test_a_preset_gives_the_model_and_its_layout_the_ranks(preset: str) -> None:
    config, _ = load_config([BASE[0], f"model={preset}", "layout=16x80"])
    assert (config.model.path, config.model.dtype, config.model.preset) == ("org/Tiny", "bfloat16", preset)
    assert config.model.config["rope_scaling"] == {"factor": 2.0}
    assert config.actor.megatron.tensor_model_parallel_size == config.critic.megatron.tensor_model_parallel_size == 4
    assert config.trainer.num_ranks == 16
    assert config.rollout.engine == "sglang"
    plain, _ = load_config([BASE[0], f"model={preset}"])
    assert (plain.trainer.num_ranks, plain.model.path) == (1, "org/Tiny")


def test_recipes_lie_over_the_preset_and_typed_words_over_all(preset: str, tmp_path: Path) -> None:
    given = recipe(tmp_path, f"model: {{preset: {preset}, dtype: float32}}\nlayout: 8x80\nrollout: {{n: 3}}\n")
    config, _ = load_config([BASE[0], given])
    assert (config.model.dtype, config.trainer.num_ranks, config.rollout.n) == ("float32", 8, 3)
    typed, _ = load_config([BASE[0], given, "layout=16x80", "actor.megatron.tensor_model_parallel_size=8"])
    assert (typed.trainer.num_ranks, typed.actor.megatron.tensor_model_parallel_size) == (16, 8)
    short = recipe(tmp_path, f"model: {preset}\nlayout: 8x80\n", "s.yaml")
    upper = recipe(tmp_path, "recipe: ./s.yaml\nlayout: 16x80\n", "u.yaml")
    assert load_config([BASE[0], short])[0].trainer.num_ranks == 8
    assert load_config([BASE[0], upper])[0].trainer.num_ranks == 16


def test_the_layout_of_a_preset_is_checked_as_any_other(preset: str, tmp_path: Path) -> None:
    told = refusal(f"model={preset}", "layout=8x80", "actor.megatron.tensor_model_parallel_size=3")
    assert told.startswith("actor.megatron.tensor_model_parallel_size=3 does not divide the model's num_attention_h")
    wrong = tmp_path / "w.yaml"
    wrong.write_text("model: {path: m}\nlayouts: {a: {actor: {megatron: {tensor_parallel_size: 3}}}}\n")
    assert refusal(f"model={wrong}", "layout=a").startswith(
        f"{wrong}: layout=a: actor.megatron.tensor_parallel_size=3: there is no key "
        "actor.megatron.tensor_parallel_size; did you mean"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("model=@ layout=61x80", "layout=61x80: model=@ has no such layout; expected one of 1x80, 8x80"),
        ("layout=8x80", "layout=8x80: expected model=NAME as well, the preset that holds it"),
        ("model=3", "model=3: expected the name of a preset or the path of a YAML file"),
        ("model=@ layout=3", "layout=3: expected the name of one of the layouts of the model's preset"),
        ("model=@ model=other", "model=other: expected one model, and model=@ is already given"),
        ("model=absent.yaml", "model=absent.yaml: no such file; expected one of "),
    ],
)
def test_a_preset_that_is_not_there_is_refused(preset: str, words: str, told: str) -> None:
    assert refusal(*words.replace("@", preset).split()).startswith(told.replace("@", preset))


def test_a_preset_lays_itself_over_nothing(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("recipe: quickstart\nmodel: {path: m}\n")
    assert refusal(f"model={file}") == (
        f"{file}: recipe=quickstart: expected no recipe in the preset of a model, which is laid under it"
    )


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    assert find("model", "qwen3_8b") == config_dir() / "model/qwen3_8b.yaml"
    wanted = f"did you mean qwen3_8b? expected one of {', '.join(preset_names())}, or the path of a YAML file"
    with pytest.raises(ValueError, match=f"^{re.escape(f'model=qwen3_8: {wanted}')}$"):
        find("model", "qwen3_8")


def test_the_written_configuration_of_a_run_with_a_preset_is_a_recipe(preset: str, tmp_path: Path) -> None:
    config, _ = load_config([BASE[0], f"model={preset}", "layout=8x80"])
    again, _ = load_config([recipe(tmp_path, to_yaml(config), "config.yaml")])
    assert again == config


def test_the_layouts_of_a_preset_are_listed(preset: str) -> None:
    assert layout_names(preset) == ["1x80", "8x80", "16x80"]
    assert all(isinstance(name, str) for name in preset_names())
