"""Tests that are coroutines: a conftest.py imports the hook, and each of them runs in an event loop of its own."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import pytest

LIMIT_S = 240.0  # of a test that waits for what does not happen


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    values = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**values), LIMIT_S))
    return True


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The same for one test of a folder without the hook."""

    @wraps(test)
    def run(*given: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*given, **named), LIMIT_S))

    return run
