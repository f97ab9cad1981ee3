"""The counter of cases: a fixture of every test, whose numbers tests/conftest.py adds up and prints; and a model."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bad_input import PROPERTY, Cases
from ring_cases import SHAPE

from megarl.data.examples.tiny import write_tiny_model


@pytest.fixture
def cases(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Iterator[Cases]:
    """The test's own counter, under the kind that its file is named after."""
    counter = Cases(request.module.__name__.partition("bad_input_")[2].replace("_", " "))
    yield counter
    assert counter.number, "a test of bad input counts what it tried"
    record_property(PROPERTY, (counter.kind, counter.number))


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model that nobody changes."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "good", SHAPE)


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    return Path(shutil.copytree(good, tmp_path / "model"))
