"""What most runs start from."""

from collections.abc import Callable
from pathlib import Path

import pytest
from ring_cases import make_parts, settings

from megarl.cli import main


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a task, a tiny model and a reward; a file that needs others has its own."""
    return make_parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture
def trained(parts: Path, tmp_path: Path) -> Callable[..., Path]:
    """Trains a run of this name with these settings, each of some words; returns its folder."""

    def train(name: str, *settings_of_it: str) -> Path:
        words = " ".join(settings_of_it).split()
        assert main(["train", *settings(parts, tmp_path, name, *words)]) == 0
        return tmp_path / name

    return train
