"""Any key with any value, one or several: a configuration, or a sentence for each fault."""

from collections.abc import Iterable
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import pytest
import yaml
from bad_input import Cases, examples, nested, read_refusal
from config_helpers import BASE, KEYS
from hypothesis import given
from hypothesis import strategies as st

from megarl.config import ConfigError, aliases, from_yaml, load_config, read_yaml, to_yaml
from megarl.config.keys import entry_types, type_of
from megarl.config.settings import from_content
from megarl.config.verl.defaults import defaults
from megarl.config.verl.taken import Command

ALL_KEYS = [*KEYS, *(key.replace("NAME", "t") for key in entry_types())]
COMMANDS = ("train", "sft", "evaluate", "serve", "config", "node", "doctor")

NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 7, 2**31, 2**63, -(2**63) - 1, 10**400]) | st.sampled_from(
    [0.0, -0.5, 0.5, 1.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")]
)
WORDS = st.sampled_from(
    [
        *("", " ", "a", "null", "off", "true", "1e999", "0x10", "1_000", "a.b", "/", "..", "~", "http://a:b", "a:b"),
        *("${trainer.seed}", "${nope}", "${trainer}", "${", "${oc.env:NOPE}", "???", "{", "[", "\n", "\t", "é", ":"),
        *("x" * 300, "{c.x}", "%s", "../../etc/passwd", "auto", "megatron", "fsdp", "grpo", "sglang", "judge", "model"),
    ]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


def tried(cases: Cases, words: list[str], command: str = "train") -> None:
    """The configuration of these words is complete, or refused with a sentence for each fault."""
    cases.add()
    try:
        config, warnings = load_config(words, command=command)
    except ConfigError as error:
        read_refusal(error)
        return
    assert all(warning.isprintable() for warning in warnings)
    assert from_yaml(to_yaml(config)) == config or "nan" in to_yaml(config)


# A composition takes 50 ms and tells all faults at once: few of them, with many values each.
@examples(50)
@given(pairs=st.lists(st.tuples(st.sampled_from(ALL_KEYS), VALUES), min_size=1, max_size=16))
def test_bad_input_any_values_of_any_keys_in_a_file(cases: Cases, tmp_path: Path, pairs: list[tuple[str, Any]]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(nested(pairs), allow_unicode=True))
    tried(cases, [*BASE, f"recipe={file}"])


@examples(50)
@given(
    words=st.lists(
        st.builds(lambda key, value: f"{key}={value}", st.sampled_from(ALL_KEYS), NUMBERS | WORDS)
        | st.text(max_size=12)
        | st.builds(lambda key, tail: f"{key}{tail}", st.sampled_from(ALL_KEYS), st.text(max_size=6)),
        min_size=1,
        max_size=12,
    ),
    command=st.sampled_from(COMMANDS),
)
def test_bad_input_any_words_on_the_command_line(cases: Cases, words: list[str], command: str) -> None:
    tried(cases, [*BASE, *words], command)


# Words of verl, and those with which their rules compute, more often than the others.
VERLS = [pattern.replace("*", "actor") for pattern in aliases._SFT_RULES]
COMPUTED = [
    *("hybrid_engine", "rollout.nnodes", "rollout.n_gpus_per_node", "rollout.tensor_model_parallel_size"),
    *("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.total_training_steps", "actor.use_dynamic_bsz"),
    *("async_training.require_batches", "async_training.trigger_parameter_sync_step", "data.train_batch_size"),
    *("rollout.update_weights_bucket_megabytes", "rollout.total_rollout_steps", "actor.ppo_mini_batch_size"),
    *("actor.optim.lr", "actor.optim.min_lr_ratio", "actor.optim.lr_warmup_steps_ratio", "actor.ppo_epochs"),
    *("actor.ppo_micro_batch_size", "actor.ppo_max_token_len_per_gpu", "ref.log_prob_micro_batch_size_per_gpu"),
    *("actor.megatron.context_parallel_size", "actor.megatron.tensor_model_parallel_size"),
]


@examples(500)
@given(
    words=st.dictionaries(st.sampled_from(COMPUTED) | st.sampled_from(VERLS), VALUES, min_size=1, max_size=8),
    is_whole=st.booleans(),
    is_sft=st.booleans(),
)
def test_bad_input_any_values_of_any_words_of_verl(
    cases: Cases, words: dict[str, Any], is_whole: bool, is_sft: bool
) -> None:
    """No rule fails, or repeats a text or a list so many times as a number of another word, or of its own, says."""
    command = Command(words, is_whole, is_sft)
    for key, value in words.items():
        cases.add()
        assert len(str(aliases.converted(key, value, command))) < 10**5
    assert len(str(defaults(command, set()))) < 10**5


def test_bad_input_every_key_refuses_values_of_another_type(cases: Cases) -> None:
    """A list where a number belongs, text where a switch belongs, a group where a value belongs, ..."""
    wrong: dict[Any, tuple[Any, ...]] = {
        bool: (7, 0.5, "maybe", [], [True], {"a": 1}),
        int: (0.5, "two", True, [], [1], 10**30, {"a": 1}),
        float: ("two", True, [], [0.5], 10**400, {"a": 1}),
        str: (True, [], ["a"], {"a": 1}),
        list: (True, 7.5, [[]], [{"a": 1}], [None], {"a": 1}),
        dict: (True, 7, "text", []),
    }
    for key in ALL_KEYS:
        kinds = [get_origin(kind) or kind for kind in get_args(type_of(key)) or (type_of(key),)]
        kinds = [get_origin(type_of(key))] if get_origin(type_of(key)) in (list, dict) else kinds
        for value in set_of_all(wrong[kind] for kind in kinds if kind is not NoneType):
            cases.add()
            layer = from_content("run.yaml", nested([(key, value)]))
            assert layer.faults, f"{key}={value!r} was taken as {layer.settings}"
            read_refusal(ConfigError(*layer.faults), f"run.yaml: {key}")


def set_of_all(groups: Iterable[tuple[Any, ...]]) -> list[Any]:
    """What is wrong for each of several types."""
    first, *others = groups
    return [value for value in first if all(any(value is x or value == x for x in other) for other in others)]


# Words that are composed at once: none of them says what another one of its line means.
PATHS = (
    ("recipe", "trainer.default_local_dir", "trainer.resume_mode"),
    ("model", "trainer.experiment_name", "reward.sandbox"),
    ("layout", "rollout.host", "trainer.master_addr", "agent.command"),
    ("data.train_files", "data.val_files", "model.path", "critic.model.path", "ref.model.path", "rollout.urls"),
    ("model.tokenizer_path", "reward.fn", "agent.fn", "distill.route", "teachers.t.model.path", "algorithm.plugins"),
    ("reward.model.path", "reward.judge.url"),
)


@pytest.mark.parametrize("keys", PATHS, ids=" ".join)
def test_bad_input_names_that_are_no_paths(cases: Cases, tmp_path: Path, keys: tuple[str, ...]) -> None:
    (tmp_path / "pipe.yaml").mkdir()
    (tmp_path / "loop.py").symlink_to(tmp_path / "loop.py")
    names = ("x" * 300, "a/" * 3000, "~nobody_here/a", f"{tmp_path}/pipe.yaml", f"{tmp_path}/loop.py:f", "http://[", "")
    also = {"reward.model.path": ["reward.fn=[model,judge]"], "distill.route": ["teachers.t.model.path=m"]}
    for name in (*names, "\x1b[2J.py:f"):
        quoted = name.replace("\\", "\\\\").replace("'", "\\'")
        words = [word for key in keys for word in (*also.get(key, []), f"{key}='{quoted}'")]
        tried(cases, [*BASE, *words])


@pytest.mark.full
def test_bad_input_files_that_are_no_configurations(cases: Cases, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for content in (b"", b"\xff\xfe", b"- a", b"a", b"{", b"a: [", b"a: b: c", b"&a [*a]", b"&a {b: *a}", b"? [a]\n: b",
                    b"!!python/object:os.system {}", b"a: !!binary x", b"1: 2", b"null: 1", b"recipe: run.yaml",
                    b"recipe: [a]", b"defaults: [a]", b"actor: 1", b"actor: [1]", b"actor: {optim: 3}", b"model: {}",
                    b"teachers: {t: 1}", b"teachers: [t]", b"teachers: {'': {coef: 1}}", b"teachers: {a.b: {coef: 1}}",
                    b"a: " + b"[" * 5000, b"a: 2001-01-01", b"rollout: {n: 2001-01-01}", b"\t", b"actor: {a: 1, a: 2}",
                    b"model: {config: {'': 1}}", b"reward: {weights: {a.b.c: x}}"):  # fmt: skip
        file.write_bytes(content)
        tried(cases, [*BASE, f"recipe={file}"])
        cases.add()
        try:
            read_yaml(file)
        except ConfigError as error:
            read_refusal(error, str(file))
