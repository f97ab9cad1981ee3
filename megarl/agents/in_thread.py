"""Calls functions of users in threads of their own, where the event loop must not wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from megarl.plugins import describe, is_async


async def called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The result; an ordinary function runs in a thread, so that other episodes go on."""
    if is_async(function):
        return await function(*args, **kwargs)
    return await in_thread(partial(function, *args, **kwargs))


async def in_thread(work: Callable[[], Any]) -> Any:
    """The result of `work` in a thread of its own: one that hangs keeps no other waiting, nor the end of the process.

    Raises what it raises; what is no Exception, such as SystemExit, as a RuntimeError.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():  # cancelled
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            passes = isinstance(raised, Exception) and not isinstance(raised, StopIteration)  # futures refuse that
            error = raised if passes else RuntimeError(describe(raised))
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="tool", daemon=True).start()
    return await done
