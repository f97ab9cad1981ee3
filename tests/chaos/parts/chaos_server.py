"""The HF server, but it spoils replies and weights for which it takes an order."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from aiohttp import web
from chaos_claims import take

from megarl.hf_server import main
from megarl.hf_server.routes import HFServer
from megarl.hf_server.weights import WeightUpdates

SLOW_S = 3.0
_generate, _end, _weights_checker = HFServer.generate, WeightUpdates.end, HFServer.weights_checker
_hangs = False
_is_slow = False


def of_each(change: Callable[[dict[str, Any]], None]) -> Callable[[web.Response], web.Response]:
    """A reply with every completion in it changed."""

    def changed(reply: web.Response) -> web.Response:
        found = json.loads(reply.text or "")
        for one in found if isinstance(found, list) else [found]:
            change(one)
        return web.Response(text=json.dumps(found), content_type="application/json")

    return changed


def log_probs_to(value: float | None) -> Callable[[dict[str, Any]], None]:
    def change(one: dict[str, Any]) -> None:
        entries = one["meta_info"]["output_token_logprobs"]
        one["meta_info"]["output_token_logprobs"] = [[value, *entry[1:]] for entry in entries]

    return change


def token_to(value: int) -> Callable[[dict[str, Any]], None]:
    def change(one: dict[str, Any]) -> None:
        one["output_ids"] = [value for _ in one["output_ids"]]
        entries = one["meta_info"]["output_token_logprobs"]
        one["meta_info"]["output_token_logprobs"] = [[entry[0], value, *entry[2:]] for entry in entries]

    return change


def shorten(one: dict[str, Any]) -> None:
    one["meta_info"]["output_token_logprobs"].pop()


SPOILED: dict[str, Callable[[web.Response], web.Response]] = {
    "nan": of_each(log_probs_to(float("nan"))),
    "null": of_each(log_probs_to(None)),
    "short": of_each(shorten),
    "negative": of_each(token_to(-1)),
    "beyond": of_each(token_to(10**12)),
    "text": lambda reply: web.Response(text="<html>gateway</html>", content_type="text/html"),
    "cut": lambda reply: web.Response(text=(reply.text or "")[:20], content_type="application/json"),
    "error": lambda reply: web.Response(status=500, text="internal error"),
}


async def generate(self: HFServer, request: web.Request) -> web.Response:
    global _hangs, _is_slow
    is_canary = (await request.json()).get("logprob_start_len", -1) >= 0  # of a push: nothing of its reply is spoilt
    kind = None if is_canary else take("reply")
    _hangs, _is_slow = _hangs or kind == "hang", _is_slow or kind == "throttle"
    if _hangs:  # for ever, while /health answers
        await asyncio.Event().wait()
    if kind == "restart":  # with the weights of its folder, and under the same process id
        os.execv(sys.executable, [sys.executable, *sys.argv])
    if kind == "slow" or _is_slow:
        await asyncio.sleep(SLOW_S)
    if kind == "reset":
        assert request.transport is not None, "the client is there"
        request.transport.abort()
    reply = await _generate(self, request)
    return SPOILED[kind](reply) if kind in SPOILED else reply


def end(self: WeightUpdates, body: Mapping[str, Any]) -> str:
    if take("push") == "error":
        raise RuntimeError("the last bucket was not loaded")
    return _end(self, body)


async def weights_checker(self: HFServer, request: web.Request) -> web.Response:
    if take("weights"):
        await asyncio.wrap_future(self.engine.run_now(lambda: flip_a_bit(self._model.weights)))
    return await _weights_checker(self, request)


def flip_a_bit(weights: Mapping[str, torch.Tensor]) -> None:
    """As memory that has an error does."""
    max(weights.values(), key=torch.numel).view(torch.uint8).flatten()[7] ^= 4


if __name__ == "__main__":
    HFServer.generate = generate  # type: ignore[method-assign]
    WeightUpdates.end = end  # type: ignore[method-assign]
    HFServer.weights_checker = weights_checker  # type: ignore[method-assign]
    main.main()
