"""What is said of a key before it is set."""

import re

import pytest

from megarl.config import ConfigError
from megarl.config.describe import described, description, descriptions, records
from megarl.config.keys import entry_types, leaf_types
from megarl.config.schema.record import BASIC


def test_every_key_has_a_meaning() -> None:
    assert [key for key in descriptions() if key not in entry_types()] == list(leaf_types())
    assert set(descriptions()) == leaf_types().keys() | entry_types().keys()
    assert not [key for key, found in descriptions().items() if len(found.meaning) < 10]


def test_a_key_of_several_roles_is_one_record_and_few_are_basic() -> None:
    first = {name: keys[0] for _, name, keys in records()}
    assert "{actor,critic,ref,teachers.NAME}.megatron.tensor_model_parallel_size" in first
    assert len(first) <= 264 and sum(known.level == BASIC for known in first.values()) <= 40


def test_a_key_with_its_range_and_a_default_of_its_own() -> None:
    found = description("algorithm.lam")
    assert (found.kind, found.default, found.allowed) == ("a number", "1.0", "a number from 0 to 1")
    assert found.spellings == ("algorithm.gae_lambda",)


def test_other_keys_for_one_entry_are_named_with_it() -> None:
    assert description("critic.optim.betas").spellings == (
        "critic.optim.beta1 (entry 0)",
        "critic.optim.beta2 (entry 1)",
    )
    assert "actor.tau_pos (entry tau_pos)" in description("algorithm.policy_loss_args").spellings


def test_a_key_that_follows_another_keeps_the_meaning_that_it_has_there() -> None:
    found = description("critic.megatron.tensor_model_parallel_size")
    assert found.default == "= actor.megatron.tensor_model_parallel_size"
    assert found.meaning == description("actor.megatron.tensor_model_parallel_size").meaning


def test_a_key_of_an_entry_is_described_whatever_the_entry_s_name() -> None:
    found = description("teachers.math.num_ranks")
    assert found == description("teachers.NAME.num_ranks")
    assert (found.default, found.allowed) == ("= actor.num_ranks", "at least 1")
    assert description("teachers").kind == "names with a group of keys each"


def test_names_and_units() -> None:
    assert description("rollout.dtype").allowed == "float32 | bfloat16"
    assert description("algorithm.adv_estimator").allowed.endswith("| a plug-in's name")
    units = {key: description(key).unit for key in ("data.train_batch_size", "sft.batch_size", "reward.timeout_s")}
    assert units == {"data.train_batch_size": "prompts", "sft.batch_size": "sequences", "reward.timeout_s": "seconds"}


def test_a_key_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"there is no key actor.clip_ration; did you mean actor.clip_ratio\?"):
        description("actor.clip_ration")


def test_a_word_that_is_no_key_finds_the_keys_with_it() -> None:
    assert [found.key for found in described("clip_ratio_l")] == ["actor.clip_ratio_low"]
    assert {"actor.clip_ratio", "critic.cliprange_value"} <= {found.key for found in described("clip")}
    assert [found.key for found in described("actor.clip_ratio")] == ["actor.clip_ratio"]
    assert all(found.key.startswith("reward.judge.") for found in described("reward.judge"))
    with pytest.raises(ConfigError, match="there is no key clop"):
        described("clop")


def test_a_meaning_stands_alone() -> None:
    """Help shows one key: a meaning that begins so needs the line above it."""
    fragment = re.compile(r"(of|its|these|this|that|the same|as|such|but|also|so|it) ")
    assert not [(key, found.meaning) for key, found in descriptions().items() if fragment.match(found.meaning)]
