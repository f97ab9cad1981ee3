"""Servers of tiny models, which the tests of this folder share; a `server` is one of every variant."""

from collections.abc import Iterator

import pytest
from server_fixtures import *  # noqa: F403
from tiny_server import Served

from megarl.processes import programs


@pytest.fixture
def server(any_server: Served) -> Served:
    return any_server


@pytest.fixture(autouse=True, scope="module")
def started_as_with_gpus() -> Iterator[None]:
    """A command that ran in this process before may have a fork server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_forked", frozenset())
        yield
