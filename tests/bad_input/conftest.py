"""The counter of cases: a fixture of every test, whose numbers tests/conftest.py adds up and prints."""

from collections.abc import Callable, Iterator

import pytest
from bad_input import PROPERTY, Cases


@pytest.fixture
def cases(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Iterator[Cases]:
    """The test's own counter, under the KIND of its file."""
    counter = Cases(request.module.KIND)
    yield counter
    assert counter.number, "a test of bad input counts what it tried"
    record_property(PROPERTY, (counter.kind, counter.number))
