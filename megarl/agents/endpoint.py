"""The endpoint that agents get as their base_url: the APIs of OpenAI and Anthropic over one policy.

Each session has an API key of its own: a client with this key speaks in this session, and in no other.
Routes for sessions need the endpoint's token.  An answer is generated to its end before the first byte is sent, also
for a stream; what is sent is a copy of what the session has recorded.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from megarl.agents import anthropic_messages, chat_completions, responses
from megarl.agents.fields import CHAT, IDS, MESSAGES, RESPONSES, SAMPLING, TEXT, RunValues, check_fields
from megarl.agents.refusals import OverLimit, Refused, expect, expect_count, shown
from megarl.agents.session import TOKEN_BYTES, ChatReply, ChatRequest, Policy, Session, closed, versions_json
from megarl.data.chat import encode_many
from megarl.io.http_limits import body_of, json_object, json_of, let_in, served
from megarl.rollout.pool.pool_server import RolloutFailed
from megarl.samples.float32 import EXPECTED, is_finite

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 16 << 20  # of a request; a context of a million tokens is about 4 MiB of text
_MAX_CLOSED = 10_000  # sessions that are remembered; older ones are as unknown as those that never were
_SESSIONS = "/sessions"
_ANTHROPIC = "/v1/messages"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Route = Callable[[web.Request, Session, dict[str, Any], int], Awaitable[web.StreamResponse]]


class ChatApi(Protocol):
    """A way to write conversations as JSON: what the modules of CHAT_APIS have in common."""

    def read(self, body: Mapping[str, Any], items: dict[str, list[Any]], /) -> ChatRequest: ...
    def write(
        self, policy: Policy, body: Mapping[str, Any], replies: Sequence[ChatReply], items: dict[str, list[Any]], /
    ) -> dict[str, Any]: ...
    def events(self, reply: Mapping[str, Any], body: Mapping[str, Any], /) -> Iterable[bytes]: ...


CHAT_APIS: dict[str, tuple[str, ChatApi]] = {
    "/v1/chat/completions": (CHAT, chat_completions),
    "/v1/responses": (RESPONSES, responses),
    _ANTHROPIC: (MESSAGES, anthropic_messages),
}


class Endpoint:
    """Example:

        async with Endpoint(policy) as endpoint:
            session = endpoint.open("0-17/3")
            agent(base_url=endpoint.url + "/v1", api_key=session.key)
            endpoint.close(session)

    Args:
        token: for the routes of sessions; None: a random one.
        host, port: where it listens; port 0: a free one.
    """

    def __init__(self, policy: Policy, *, token: str | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self._policy, self.token = policy, token or secrets.token_urlsafe(32)
        self._host = host
        self._port = port
        self._stack = AsyncExitStack()
        self._open: dict[bytes, Session] = {}  # by the digest of the key
        self._closed: dict[bytes, str] = {}  # names
        self._said: set[str] = set()  # fields of requests
        self.url = ""
        self._app = web.Application(middlewares=[self._around], client_max_size=_MAX_BODY_BYTES)
        routes: dict[str, _Route] = {
            **{path: self._chat(name, api) for path, (name, api) in CHAT_APIS.items()},
            "/v1/completions": self._text,
            _ANTHROPIC + "/count_tokens": self._count_tokens,
            "/inference/v1/generate": self._generate,
            "/v1/reward": self._reward,
        }
        for begin in ("", "/s/{key}"):
            for path, route in routes.items():
                self._app.router.add_post(begin + path, self._in_session(route))
            for path in ("/v1/models", "/v1/models/{model}"):
                self._app.router.add_get(begin + path, self._models)
        self._app.on_response_prepare.append(_number)
        self._app.router.add_post(_SESSIONS, self._open_session)
        self._app.router.add_get(_SESSIONS + "/{name:.+}", self._show_session)
        self._app.router.add_delete(_SESSIONS + "/{name:.+}", self._close_session)

    async def __aenter__(self) -> Endpoint:
        port = await self._stack.enter_async_context(served(self._app, self._host, self._port))
        self.url = f"http://{self._host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in list(self._open.values()):
            self.close(session)
        await self._stack.aclose()

    def open(self, name: str, policy: Policy | None = None) -> Session:
        """A new session.  Its name decides the seeds of its answers.  `policy`: None is that of the endpoint."""
        session = Session(name, policy or self._policy)
        self._open[_digest(session.key)] = session
        return session

    def close(self, session: Session) -> None:
        """Close a session; requests with its key get status 410."""
        digest = _digest(session.key)
        del self._open[digest]
        self._closed[digest] = session.name
        if len(self._closed) > _MAX_CLOSED:
            del self._closed[next(iter(self._closed))]
        session.close()

    def url_of(self, session: Session) -> str:
        """An address that holds the session's key, for agents that get nothing else; routes begin behind it."""
        return f"{self.url}/s/{session.key}"

    # ---- around every request

    @web.middleware
    async def _around(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Errors in the form of the API that was asked."""
        try:
            return await handler(request)
        except Refused as error:
            return _error(request, error.status, str(error), error.code)
        except web.HTTPException as error:
            too_long = "prompt is too long: " if error.status == 413 else ""
            return _error(request, error.status, f"{too_long}{request.method} {_shown_path(request)}: {error.reason}")
        except ValueError as error:
            return _error(request, 400, str(error))
        except RecursionError:  # of what shows or writes a value of the request
            return _error(request, 400, "the request is nested too deeply")
        except RolloutFailed as error:
            return _error(request, 503, str(error))
        except Exception as error:
            logger.exception("%s %s failed", request.method, _shown_path(request))
            return _error(request, 500, f"{type(error).__name__}: {error}")

    def _in_session(self, route: _Route) -> _Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            session = self._session(request)  # before a byte of the body is read
            with session.noted():
                raw = await body_of(request)
                body = await session.aside(len(raw), partial(json_of, raw))
                return await route(request, self._session(request), body, len(raw))

        return handler

    def _session(self, request: web.Request) -> Session:
        digest = _digest(_key(request))
        if digest in self._closed:
            raise closed(self._closed[digest])
        if digest not in self._open:
            raise Refused(401, "the API key is of no session: expected the key of an open one", "invalid_api_key")
        let_in(request)
        return self._open[digest]

    def _check(self, session: Session, body: Mapping[str, Any], api: str) -> None:
        if api not in (IDS, SAMPLING):
            expect(body, "model", str, "the name of the model")
            expect(body, "stream", bool, "true or false", False)
        self._say(check_fields(body, api, _run_values(session.policy, self._policy), self._policy.ignore))

    def _say(self, said: Mapping[str, str]) -> None:
        for name in said.keys() - self._said:
            self._said.add(name)
            logger.warning("an agent sends %s (said once; docs/agent_requests.md)", said[name])

    # ---- routes of a session

    def _chat(self, name: str, api: ChatApi) -> _Route:
        """A conversation in the form of one of the APIs."""

        async def route(request: web.Request, session: Session, body: dict[str, Any], size: int) -> web.StreamResponse:
            self._check(session, body, name)
            asked = await session.aside(size, partial(api.read, body, session.items))
            self._say(asked.said)
            replies = await session.chat(asked, size)
            written = TOKEN_BYTES * sum(len(each.completion.token_ids) for each in replies)
            reply = await session.aside(
                max(size, written), partial(api.write, session.policy, body, replies, session.items)
            )
            return await _send(request, body, reply, api.events(reply, body))

        return route

    async def _text(
        self, request: web.Request, session: Session, body: dict[str, Any], size: int
    ) -> web.StreamResponse:
        self._check(session, body, TEXT)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            (prompt,) = prompt
        if isinstance(prompt, str):
            read = partial(encode_many, self._policy.tokenizer, [prompt], enough=session.policy.max_tokens)
            (prompt,) = await session.aside(size, read)
        limit = expect_count(body, "max_tokens")
        num = chat_completions.read_num(body)
        if not isinstance(prompt, list) or any(isinstance(each, str) for each in prompt[:1]):
            raise Refused(400, f"prompt={shown(prompt)}: expected one text, or one list of token ids")
        stop = chat_completions.read_stop(body, "stop")
        replies = await session.continue_ids(prompt, num, limit, stop=stop)
        reply = chat_completions.text_reply(session.policy, body, replies)
        return await _send(request, body, reply, chat_completions.text_events(reply, body))

    async def _count_tokens(
        self, request: web.Request, session: Session, body: dict[str, Any], size: int
    ) -> web.StreamResponse:
        self._check(session, body, MESSAGES)
        most = session.policy.max_tokens

        def count() -> int:
            asked = anthropic_messages.read(body)
            return len(self._policy.template.whole(asked.messages, asked.tools, most))

        if (num := await session.aside(size, count)) > most:
            raise OverLimit(f"the prompt has {session.policy.shown(num)} tokens, and an episode may have {most}")
        return web.json_response({"input_tokens": num})

    async def _generate(
        self, request: web.Request, session: Session, body: dict[str, Any], _: int
    ) -> web.StreamResponse:
        """Ids in, ids out, as trainers' own clients ask for them."""
        self._check(session, body, IDS)
        sampling = expect(body, "sampling_params", dict, "an object", {})
        self._check(session, sampling, SAMPLING)
        limit = expect_count(sampling, "max_tokens")
        prompt_ids = expect(body, "token_ids", list, "a list of token ids")
        num = chat_completions.read_num(sampling)
        choices = []
        stop_ids = expect(sampling, "stop_token_ids", list, "a list of token ids", [])
        chat_completions.check_stops(stop_ids, "stop_token_ids")
        for index, reply in enumerate(await session.continue_ids(prompt_ids, num, limit, stop_ids)):
            completion = reply.completion
            pairs = zip(completion.token_ids, completion.log_probs, strict=True)
            content = [{"token": f"token_id:{token_id}", "logprob": value} for token_id, value in pairs]
            choices.append(
                {
                    "index": index,
                    "token_ids": completion.token_ids,
                    "finish_reason": completion.finish_reason,
                    "logprobs": {"content": content},
                    "weight_versions": versions_json(completion),
                }
            )
        return web.json_response({"request_id": secrets.token_hex(12), "choices": choices})

    async def _reward(self, request: web.Request, session: Session, body: dict[str, Any], _: int) -> web.StreamResponse:
        reward = body.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not is_finite(reward):
            raise Refused(400, f"reward={shown(reward)}: {EXPECTED}")
        turn = expect(body, "turn", int, "the number of a turn, from 1 on", None)
        if turn is None:
            session.reward = float(reward)
        elif turn > len(session.conversation.turns):
            raise Refused(400, f"turn={turn}: the session has {len(session.conversation.turns)}")
        else:
            session.turn_rewards[turn - 1] += float(reward)
        return web.json_response({"session": session.name, "reward": session.reward})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if not self._holds_token(request):
            self._session(request)
        asked, name = request.match_info.get("model"), self._policy.name
        if asked is not None:
            check_fields({"model": asked}, CHAT, {"model": (name,)}, self._policy.ignore)
        # In the forms of both OpenAI's and Anthropic's clients.
        model = {"id": name, "object": "model", "created": 0, "owned_by": "megarl"}
        model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        model["max_model_len"] = self._policy.max_tokens
        ends = {"has_more": False, "first_id": name, "last_id": name}
        return web.json_response({"object": "list", "data": [model], **ends} if asked is None else model)

    # ---- sessions

    def _holds_token(self, request: web.Request) -> bool:
        holds = secrets.compare_digest(_digest(_key(request)), _digest(self.token))
        if holds:
            let_in(request)
        return holds

    def _named(self, request: web.Request) -> Session:
        self._check_token(request)
        name = request.match_info["name"]
        for session in self._open.values():
            if session.name == name:
                return session
        raise closed(name) if name in self._closed.values() else Refused(404, f"there is no session {name!r}")

    def _check_token(self, request: web.Request) -> None:
        if not self._holds_token(request):
            raise Refused(401, "sessions want the endpoint's token as API key", "invalid_api_key")

    async def _open_session(self, request: web.Request) -> web.StreamResponse:
        self._check_token(request)
        name = expect(await json_object(request), "name", str, "text", None)
        if any(session.name == name for session in self._open.values()):
            raise ValueError(f"session {name!r} is open; expected another name")
        session = self.open(secrets.token_hex(8) if name is None else name)
        return web.json_response({"session": session.name, "key": session.key, "base_url": self.url + "/v1"})

    async def _show_session(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._named(request).record())

    async def _close_session(self, request: web.Request) -> web.StreamResponse:
        session = self._named(request)
        self.close(session)
        return web.json_response(session.record())


def _run_values(own: Policy, training: Policy) -> RunValues:
    """`training`: agents that always send its values are served in an evaluation, too, with those of the session."""
    sampling = {
        name: (getattr(own.params, name), getattr(training.params, name)) for name in ("temperature", "top_p", "top_k")
    }
    return {**sampling, "model": (own.name,), "chat_template_kwargs": (own.template.settings,)}


async def _number(_: web.Request, response: web.StreamResponse) -> None:
    """The number of a request, where OpenAI's and Anthropic's clients look for it."""
    response.headers["x-request-id"] = response.headers["request-id"] = f"req_{secrets.token_hex(12)}"


def _key(request: web.Request) -> str:
    """OpenAI's clients send it as a bearer token, Anthropic's in a header of their own; see also `url_of`."""
    return (
        request.match_info.get("key")
        or request.headers.get("X-Api-Key")
        or re.sub("^bearer +", "", request.headers.get("Authorization", ""), flags=re.IGNORECASE)
    )


def _shown_path(request: web.Request) -> str:
    """Without the key of `url_of`."""
    return re.sub(r"^/s/[^/]*", "/s/KEY", request.path)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()  # a header may be no UTF-8


async def _send(
    request: web.Request, body: Mapping[str, Any], reply: Mapping[str, Any], events: Iterable[bytes]
) -> web.StreamResponse:
    """The reply, or the same as a stream of events."""
    if not body.get("stream"):
        return web.json_response(reply)
    out = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await out.prepare(request)
    with suppress(ConnectionError):  # the client has gone
        for event in events:
            await out.write(event)
        await out.write_eof()
    return out


def _error(request: web.Request, status: int, message: str, code: str | None = None) -> web.Response:
    if _ANTHROPIC in request.path:
        return web.json_response(anthropic_messages.error_body(status, message, code), status=status)
    kind = "authentication_error" if status == 401 else "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return web.json_response({"error": error}, status=status)
