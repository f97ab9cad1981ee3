"""Ranks that the tests of a module share: starting them costs more than most of what they do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from spawn import Ranks


@pytest.fixture(
    scope="module"
)  # no longer: what a model leaves in a process (threads of gloo's, each often awake) adds up
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks
