"""What the tests of the configuration share: the shortest command line that is one, and how a refusal reads."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megarl import algo, rewards
from megarl.config import Config, ConfigError, load_config
from megarl.config.keys import leaf_types

BASE = ("data.train_files=[a.jsonl]", "model.path=m")  # what no run can do without
# A model of 12 layers, 8 heads over 4 of keys and values, with room for 2048 tokens; and one with 8 experts.
DENSE = (
    "model.config={num_hidden_layers:12,num_attention_heads:8,num_key_value_heads:4,hidden_size:64,"
    "intermediate_size:96,vocab_size:120,max_position_embeddings:2048}"
)
EXPERTS = f"{DENSE[:-1]},num_experts:8,moe_intermediate_size:24}}"
KEYS = sorted(leaf_types())

TABLES: tuple[dict[str, Any], ...] = (algo.POLICY_LOSSES, algo.ADV_ESTIMATORS, algo.KL_ESTIMATORS, rewards.REWARDS)


@contextmanager
def tables_kept() -> Iterator[None]:
    """What a plug-in adds inside is taken out again, so that other tests of this process find the tables as shipped."""
    tables = [dict(table) for table in TABLES]
    modules = set(sys.modules)
    try:
        yield
    finally:
        for table, before in zip(TABLES, tables, strict=True):
            table.clear()
            table.update(before)
        for name in set(sys.modules) - modules:
            if name.startswith("megarl_plugin_"):
                del sys.modules[name]


def load(*overrides: str, command: str = "train") -> Config:
    """A command line that gives no warning."""
    config, warnings = load_config([*BASE, *overrides], command=command)
    assert not warnings, warnings
    return config


def refusals(*overrides: str, command: str = "train") -> list[str]:
    """The sentences with which a command line is refused, one for each fault."""
    base = [word for word in BASE if command != "sft" or word.startswith("model.")]
    with pytest.raises(ConfigError) as caught:
        load_config([*base, *overrides], command=command)
    sentences = str(caught.value).split("\n")
    assert all(sentences)
    return sentences


def refusal(*overrides: str, command: str = "train") -> str:
    """The one sentence with which a command line of one fault is refused."""
    (sentence,) = refusals(*overrides, command=command)
    return sentence
