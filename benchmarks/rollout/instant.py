"""A server that writes nothing: every completion that it is asked for is there already.

With it a client shows how many tokens a second it can take, whatever servers there are.
"""

from __future__ import annotations

import asyncio
import json
import random

from aiohttp import web

from megarl.processes.lifetime import die_with_parent
from megarl.rollout.protocol import Route

_SHARED = {"cached_tokens": 0, "weight_version": "0"}


class Instant:
    """Answers in SGLang's words; replies of one shape are made once."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary, self._random = vocabulary, random.Random(0)
        self._replies: dict[tuple[int, int, int], bytes] = {}

    async def generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        params = asked["sampling_params"]
        shape = (params["n"], params["max_new_tokens"], len(asked["input_ids"]))
        if shape not in self._replies:
            self._replies[shape] = json.dumps([self._completion(*shape[1:]) for _ in range(shape[0])]).encode()
        return web.Response(body=self._replies[shape], content_type="application/json")

    async def flush(self, _: web.Request) -> web.Response:
        return web.Response()

    def _completion(self, num_tokens: int, prompt_tokens: int) -> dict[str, object]:
        tokens = [self._random.randrange(6, self._vocabulary) for _ in range(num_tokens)]
        triples = [[-5 * self._random.random(), token, None] for token in tokens]
        spans = [{"version": "0", "start": 0, "end": num_tokens}]
        meta = {**_SHARED, "finish_reason": {"type": "length", "length": num_tokens}, "weight_versions": spans}
        meta |= {"output_token_logprobs": triples, "completion_tokens": num_tokens, "prompt_tokens": prompt_tokens}
        return {"text": "", "output_ids": tokens, "meta_info": meta}


async def _serve(port: int, vocabulary: int) -> None:
    instant = Instant(vocabulary)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post(Route.GENERATE, instant.generate)
    app.router.add_post(Route.FLUSH_CACHE, instant.flush)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()


def serve(port: int, vocabulary: int, parent: int) -> None:
    """Until the parent goes or ends us."""
    die_with_parent(parent)
    asyncio.run(_serve(port, vocabulary))
