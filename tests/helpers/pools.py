"""A pool over servers of a few lines, and waiting for what happens in it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from fake_servers import Handler, serving
from states import trusted

from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.settings import GenerationSettings


class Pooled(NamedTuple):
    pool: EnginePool
    urls: list[str]
    seen: list[list[Any]]  # bodies of /generate that each server got

    @property
    def counts(self) -> list[int]:
        """Requests that each server got."""
        return [len(bodies) for bodies in self.seen]


@asynccontextmanager
async def pool_of(
    *handlers: Handler,
    unfit: list[tuple[str, str]] | None = None,
    timeout_s: float = 200,
    rest_s: float = 0.01,
    make: type[EnginePool] = EnginePool,
    trusts: int | None = None,
    **options: Any,
) -> AsyncIterator[Pooled]:
    """A server for each handler, and their pool.  `unfit`: gets what is told to the owner of the servers.

    `trusts`: each server gets no requests until it is trusted, and is so with this version at first.
    """
    options |= {"timeout_s": timeout_s, "rest_s": rest_s} | ({} if trusts is None else {"fenced": True})
    on_unfit = None if unfit is None else lambda *told: unfit.append(told)
    async with serving(*handlers) as (urls, seen), make(urls, "", GenerationSettings(**options), on_unfit) as pool:
        if trusts is not None:
            for url in urls:
                pool.update(trusted(url, trusts))
        yield Pooled(pool, urls, seen)


async def until(happens: Callable[[], object]) -> None:
    while not happens():
        await asyncio.sleep(0.005)
