"""What all routes of this folder's servers share: the token, the JSON body, and the reply to a refused request."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from megarl.network.http_limits import body_of
from megarl.rollout.protocol import Route

logger = logging.getLogger("megarl.hf_server.main")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 64 << 20


def application(token: str) -> web.Application:
    """An application without routes, every request to which passes `guard`."""
    return web.Application(middlewares=[guard(token)], client_max_size=MAX_BODY_BYTES)


def guard(token: str) -> Any:
    """Checks the token; refusals become 400 in SGLang's JSON, unexpected errors 500 with a traceback in the log."""
    wanted = b"Bearer " + token.encode()

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        open_to_all = request.path == Route.HEALTH  # as in SGLang, whose router relies on it
        if token and not open_to_all and not hmac.compare_digest(given, wanted):
            refusal = web.json_response({"error": "Unauthorized"}, status=401)
            refusal.force_close()  # strangers keep no connection
            return refusal
        try:
            return await handler(request)
        except web.HTTPException as error:
            return web.json_response({"error": f"{request.method} {request.path}: {error.reason}"}, status=error.status)
        except ValueError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.path)
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)

    return guarded


async def json_body(request: web.Request) -> Mapping[str, Any]:
    """The JSON object of the body; a missing body counts as an empty object."""
    raw = await body_of(request)
    if not raw:
        return {}
    try:
        body = orjson.loads(raw)
    except ValueError as error:
        raise ValueError(f"the body of {request.path} is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError(f"the body of {request.path} is not a JSON object")
    return body
