"""Ranks that the tests of a module share: starting them costs more than most of what they do.

Not longer than that: what a model leaves in a process (threads of gloo's, each often awake) adds up.
"""

from collections.abc import Iterator

import pytest
from spawn import Ranks


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks
