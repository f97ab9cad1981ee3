"""The routes of the HF server: turns SGLang's JSON into calls of the engine.

Every route except /health, whose reply has no content, requires the token (401 without). Refused requests return 400
and change nothing.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from megarl.hf_server.calls import read_call, write_reply
from megarl.hf_server.model import HFModel
from megarl.hf_server.running_batch import Call
from megarl.hf_server.scheduler import CACHE, GRAPHS, WEIGHTS, HFEngine
from megarl.hf_server.weights import WeightUpdates
from megarl.io.http_limits import json_object, let_in
from megarl.rollout.protocol import PAUSE_MODES, Route
from megarl.servers.launch import WEIGHT_LOADER

logger = logging.getLogger("megarl.hf_server.main")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_BODY_BYTES = 64 << 20

_ROUTES: dict[Route, tuple[str, str]] = {  # route -> methods, handler of HFServer
    Route.HEALTH: ("GET", "health"),
    Route.SERVER_INFO: ("GET", "server_info"),
    Route.MODEL_INFO: ("GET", "model_info"),
    Route.LOADS: ("GET", "loads"),
    Route.GENERATE: ("POST PUT", "generate"),
    Route.PAUSE: ("POST", "pause"),
    Route.CONTINUE: ("POST", "resume"),
    Route.ABORT: ("POST", "abort"),
    Route.FLUSH_CACHE: ("GET POST", "flush_cache"),
    Route.RELEASE_MEMORY: ("GET POST", "release_memory"),
    Route.RESUME_MEMORY: ("GET POST", "resume_memory"),
    Route.WEIGHTS_CHECKER: ("GET POST", "weights_checker"),
}
_UPDATE_ROUTES: dict[Route, str] = {  # route -> method of WeightUpdates, run in a thread
    Route.INIT_GROUP: "init_group",
    Route.DESTROY_GROUP: "destroy_group",
    Route.BEGIN_UPDATE: "begin",
    Route.END_UPDATE: "end",
    Route.UPDATE_FROM_DISTRIBUTED: "from_distributed",
    Route.UPDATE_FROM_TENSOR: "from_tensor",
    Route.UPDATE_FROM_DISK: "from_disk",
}


def application(token: str) -> web.Application:
    """An application without routes, whose requests all pass `guard`."""
    return web.Application(middlewares=[guard(token)], client_max_size=MAX_BODY_BYTES)


def guard(token: str) -> Any:
    """Checks the token; refusals become 400 in SGLang's JSON, unexpected errors 500 with a traceback in the log."""
    wanted = b"Bearer " + token.encode()

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogatepass")  # it may be no UTF-8
        if not token or hmac.compare_digest(given, wanted):
            let_in(request)
        elif request.path != Route.HEALTH:  # open to all, as in SGLang, whose router relies on it
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return web.json_response({"error": f"{request.method} {request.path}: {error.reason}"}, status=error.status)
        except ValueError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        except RecursionError:  # of what shows a value of the request
            return web.json_response({"success": False, "message": "the request is nested too deeply"}, status=400)
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.path)
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)

    return guarded


class HFServer:
    """The HTTP side. Example: AppRunner(HFServer(model, token, ...).app)."""

    def __init__(self, model: HFModel, token: str, *, group_timeout_s: float, **engine_settings: Any) -> None:
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._replies: dict[int, asyncio.Future[None]] = {}  # id(call) -> resolved when the call is complete
        self._started = time.time()
        self.ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        self.engine = HFEngine(
            model,
            on_done=lambda calls: self._loop.call_soon_threadsafe(self._resolve, calls),
            on_death=lambda error: self._loop.call_soon_threadsafe(self.end, error),
            **engine_settings,
        )
        updates = WeightUpdates(self.engine, group_timeout_s)
        self.app = application(token)
        for route, (methods, name) in _ROUTES.items():
            for method in methods.split():
                self.app.router.add_route(method, route, getattr(self, name))
        for route, name in _UPDATE_ROUTES.items():
            self.app.router.add_post(route, _in_thread(getattr(updates, name)))

    def _resolve(self, calls: list[Call]) -> None:
        for call in calls:
            reply = self._replies.pop(id(call), None)  # None if the client has disconnected
            if reply is not None and not reply.done():
                reply.set_result(None)

    def end(self, error: BaseException | None = None) -> None:
        """Resolve `ended`, with the engine's error if it failed, and fail all waiting requests."""
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(RuntimeError(f"the server ends: {error or 'it was asked to'}"))
        if not self.ended.done():
            self.ended.set_result(error)

    # ---- routes

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine.alive else 503)

    async def server_info(self, request: web.Request) -> web.Response:
        state = {"num_running_reqs": self.engine.num_running, "num_waiting_reqs": self.engine.num_waiting}
        state["num_decoded_tokens"] = self.engine.num_decoded
        info = {
            "version": "megarl-hf",
            "model_path": self._model.folder,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "max_running_requests": self.engine.max_running,
            "max_total_num_tokens": self.engine.max_total_tokens,
            # A prompt of this length is refused, as SGLang says it: it leaves no room for a new token.
            "max_req_input_len": min(self._model.context_length, self.engine.max_total_tokens),
            "weight_version": self.engine.weight_version,
            "is_paused": self.engine.paused,
            "tp_size": 1,
            "device": self._model.device.type,
            "base_gpu_id": self._model.device.index or 0,
            "custom_weight_loader": [WEIGHT_LOADER],
            "enable_return_routed_experts": self._model.routes is not None,
            "sampling_mask_max_tokens": None,  # no limit
            "startup_time": {"finished_at": self._started},
            "internal_states": [state],
        }
        return web.json_response(info)

    async def loads(self, request: web.Request) -> web.Response:
        load = {"dp_rank": 0, "num_running_reqs": self.engine.num_running, "num_waiting_reqs": self.engine.num_waiting}
        load |= {"num_used_tokens": self.engine.num_kv_tokens, "max_total_num_tokens": self.engine.max_total_tokens}
        return web.json_response({"loads": [load]})

    async def model_info(self, request: web.Request) -> web.Response:
        config = self._model.config
        info = {
            "model_path": self._model.folder,
            "tokenizer_path": self._model.folder,
            "is_generation": True,
            "weight_version": self.engine.weight_version,
            "model_type": config.model_type,
            "architectures": config.architectures,
            "vocab_size": self._model.vocab_size,
            "context_length": self._model.context_length,
            "eos_token_ids": list(self._model.eos_ids),
        }
        return web.json_response(info)

    async def generate(self, request: web.Request) -> web.Response:
        try:
            body = await json_object(request)
            call = read_call(body, self._model, self.engine.max_total_tokens)
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        reply = self._replies[id(call)] = self._loop.create_future()
        self.engine.submit(call)
        try:
            await reply
        except asyncio.CancelledError:  # the client has disconnected
            self._replies.pop(id(call), None)
            self.engine.run_now(lambda: self.engine.abort(lambda row: row.call is call))
            raise
        return web.Response(body=orjson.dumps(write_reply(call, body)), content_type="application/json")

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await json_object(request)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode={mode!r}: expected one of {', '.join(PAUSE_MODES)}")
        await asyncio.wrap_future(self.engine.run_now(lambda: self.engine.pause(mode)))
        return web.json_response({"status": "ok", "message": f"paused ({mode})"})

    async def resume(self, request: web.Request) -> web.Response:
        await asyncio.wrap_future(self.engine.run_now(self.engine.resume))
        return web.json_response({"status": "ok", "message": "continued"})

    async def abort(self, request: web.Request) -> web.Response:
        body = await json_object(request)
        rid, everything = body.get("rid"), bool(body.get("abort_all"))
        order = functools.partial(self.engine.abort, lambda row: everything or row.rid == rid)
        await asyncio.wrap_future(self.engine.run_now(order))
        return web.Response()

    async def flush_cache(self, request: web.Request) -> web.Response:
        try:
            await asyncio.wrap_future(self.engine.run_now(self.engine.flush_cache))
        except ValueError as error:
            return web.Response(text=str(error), status=400)
        return web.Response(text="Cache flushed.")

    async def release_memory(self, request: web.Request) -> web.Response:
        tags = _memory_tags(await json_object(request))
        await asyncio.wrap_future(self.engine.run_now(lambda: self.engine.release(tags)))
        return web.Response()

    async def resume_memory(self, request: web.Request) -> web.Response:
        tags = _memory_tags(await json_object(request))
        await asyncio.wrap_future(self.engine.run_now(lambda: self.engine.take_back(tags)))
        return web.Response()

    async def weights_checker(self, request: web.Request) -> web.Response:
        action = (await json_object(request)).get("action", "checksum")
        if action != "checksum":
            raise ValueError(f"action={action!r}: expected 'checksum'")
        checksums = await asyncio.wrap_future(self.engine.run_now(self._model.checksums))
        whole = _digest_of(checksums)
        ranks = [{"checksums": checksums, "per_gpu_checksum": whole, "parallelism_info": {"tp_rank": 0, "tp_size": 1}}]
        return web.json_response({"success": True, "message": "", "ranks": ranks, "per_engine_checksum": whole})


def _in_thread(method: Callable[[Mapping[str, Any]], str]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler that runs a blocking method in a thread; the method returns a message."""

    async def handler(request: web.Request) -> web.Response:
        message = await asyncio.to_thread(method, await json_object(request))
        return web.json_response({"success": True, "message": message})

    return handler


def _memory_tags(body: Mapping[str, Any]) -> list[str]:
    """The kinds of memory that a request names; none named: all."""
    known = [WEIGHTS, CACHE, GRAPHS]
    tags = body.get("tags") or known
    if not isinstance(tags, list) or any(tag not in known for tag in tags):
        raise ValueError(f"tags={tags!r}: expected a list of weights, kv_cache or cuda_graph")
    return tags


def _digest_of(checksums: Mapping[str, str]) -> str:
    lines = "".join(f"{name}:{digest}\n" for name, digest in sorted(checksums.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
