"""Mappings of any values arrive as they were written, from whichever place: words, files, recipes, sweeps, runs."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.agents.load import load_episode
from megarl.config import load_config, load_sweep, read_yaml, to_yaml
from megarl.config.keys import entry_types, is_free, leaf_types
from megarl.config.settings import ConfigError, from_command_line, from_content

AGENT = ("recipe=quickstart", "trainer.check_export=false", "agent.fn=agent.py:episode")
CONTENT = {
    "cfg": {"a": {"b": 1}, "c.d": {"e": None}, "empty": {}, "list": [{"x": {"y": "off"}}, [], 3]},
    "use_dynamic_bsz": True,  # names that mean something in documents of others
    "strategy": {"fsdp_config": {"optim": {"lr_warmup_steps": 10}}},
}
WORD = (
    "{cfg:{a:{b:1},c.d:{e:null},empty:{},list:[{x:{y:'off'}},[],3]},use_dynamic_bsz:true,"
    "strategy:{fsdp_config:{optim:{lr_warmup_steps:10}}}}"
)
FREE = [key.replace("NAME", "math") for key in leaf_types() | entry_types() if is_free(key)]


@pytest.fixture(autouse=True)
def agent() -> None:
    Path("agent.py").write_text("async def episode(chat, prompt, cfg, **rest):\n    return float(cfg['a']['b'])\n")


def args_of(*words: str) -> dict[str, Any]:
    return load_config([*AGENT, *words])[0].agent.args


@pytest.mark.parametrize("key", FREE)
def test_every_free_mapping_of_a_word_or_a_file_arrives_whole(key: str) -> None:
    content = {"cfg": CONTENT["cfg"]} if "override_" in key else CONTENT  # others' words for Megatron's names count
    word = WORD if "override_" not in key else WORD.partition(",use_")[0] + "}"
    nested: Any = content
    for name in reversed(key.split(".")):
        nested = {name: nested}
    for layer in (
        from_command_line([f"{key}={word}"]),
        from_content("file", nested),
        from_content("f", {key: content}),
    ):
        assert not layer.faults and not layer.warnings
        found: dict[str, Any] = {}
        for setting in layer.settings:
            assert setting.key == key
            found |= setting.value
        assert found == content


def test_a_nested_argument_reaches_the_function_of_an_agent() -> None:
    episode = load_episode("agent.py:episode", args_of("agent.args={cfg:{a:{b:1}}}"))
    assert episode.arguments == {"cfg": {"a": {"b": 1}}}


def test_files_recipes_saved_runs_and_words_come_to_the_same() -> None:
    Path("below.yaml").write_text(yaml.safe_dump({"recipe": "quickstart", "agent": {"args": CONTENT}}))
    Path("mine.yaml").write_text("recipe: below.yaml\ntrainer: {check_export: false}\nagent: {fn: agent.py:episode}\n")
    config, _ = load_config(["recipe=mine.yaml"])
    assert config.agent.args == CONTENT == args_of(f"agent.args={WORD}")
    Path("config.yaml").write_text(to_yaml(config))
    assert read_yaml(Path("config.yaml")) == config
    again, _ = load_config(["recipe=config.yaml"])
    assert again.agent.args == CONTENT


def test_a_path_of_names_and_a_mapping_are_laid_over_what_a_file_has() -> None:
    Path("mine.yaml").write_text("recipe: quickstart\nagent: {args: {cfg: {a: {b: 1}}, k: 2}}\n")
    words = ("recipe=mine.yaml", *AGENT[1:])
    laid = [*words, "agent.args.cfg.a.c=3", "agent.args={cfg:{a:{b:4}}}", "agent.args.cfg.d={e:5}"]
    assert load_config(laid)[0].agent.args == {"cfg": {"a": {"b": 4, "c": 3}, "d": {"e": 5}}, "k": 2}
    assert load_config([*words, "agent.args.cfg={}"])[0].agent.args == {"cfg": {}, "k": 2}
    assert load_config([*words, "agent.args={}"])[0].agent.args == {}


def test_values_of_other_keys_are_put_in_under_names_with_dots_too() -> None:
    assert args_of("data.seed=7", "agent.args={cfg:{a:'${data.seed}',b.c:'${data.seed}'}}") == {
        "cfg": {"a": 7, "b.c": 7}
    }


def test_a_sweep_tries_nested_mappings_over_what_other_words_set() -> None:
    runs = load_sweep([*AGENT, "agent.args={k:0}", "agent.args={cfg:{a:{b:1}}},{cfg:{a:{b:2}}}", "agent.args.cfg.z=5"])
    assert [run.config.agent.args for run in runs] == [{"k": 0, "cfg": {"a": {"b": each}, "z": 5}} for each in (1, 2)]
    for run in runs:  # the words of a run, which `megarl train -m` starts it with
        assert load_config(list(run.words))[0].agent.args == run.config.agent.args


@pytest.mark.parametrize("text", ["5", "[a]", "{cfg:{null:1}}", "{null:1}"])
def test_what_is_no_mapping_of_names_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"agent.args=.*: expected names with any value each"):
        args_of(f"agent.args={text}")


def test_a_number_as_the_name_of_an_argument_is_text() -> None:
    assert args_of("agent.args={1:{2:3}}") == {"1": {2: 3}}


def test_a_mapping_in_a_mapping_of_numbers_or_texts_is_refused() -> None:
    for word in ("algorithm.reward_weights={a:{b:1}}", "reward.by_data_source={openai:{gsm8k:math}}"):
        with pytest.raises(ConfigError, match="={.*}: expected (a number|text)"):
            load_config(["recipe=quickstart", word])
