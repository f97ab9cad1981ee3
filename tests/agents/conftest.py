"""Tests of this folder may be coroutines; those of clients tell of them to benchmarks/test_pages/agents_page.py."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from async_tests import pytest_pyfunc_call  # noqa: F401


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Cells of the test's row in the page, some early and some late: `tell(client="openai", version="3.57.0")`."""

    def tell(**cells: Any) -> None:
        for name, value in cells.items():
            request.node.user_properties.append((f"client.{name}", json.dumps(value)))

    return tell
