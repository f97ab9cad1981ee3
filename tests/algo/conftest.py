"""What tests of the loss layer share."""

from collections.abc import Iterator

import pytest
from config_helpers import tables_kept


@pytest.fixture
def tables() -> Iterator[None]:
    """What a test registers is gone afterwards."""
    with tables_kept():
        yield
