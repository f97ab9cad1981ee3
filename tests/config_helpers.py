"""What the tests of the configuration share: the shortest command line that is one, and how a refusal reads."""

import pytest

from megarl.config import Config, ConfigError, load_config
from megarl.config.keys import leaf_types

BASE = ("data.train_files=a.jsonl", "model.path=m")  # what no run can do without
KEYS = sorted(leaf_types())


def load(*overrides: str, command: str = "train") -> Config:
    """A command line that gives no warning."""
    config, warnings = load_config([*BASE, *overrides], command=command)
    assert not warnings, warnings
    return config


def refusal(*overrides: str, command: str = "train") -> str:
    """The one sentence with which a command line is refused."""
    with pytest.raises(ConfigError) as caught:
        load_config([*BASE, *overrides], command=command)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence
