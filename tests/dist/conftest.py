"""Ranks that several modules share: starting them costs more than most of what they do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from spawn import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks
