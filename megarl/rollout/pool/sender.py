"""One request to one server: sends it, ends it in time, reads the reply, and waits until its weights are verified."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import resource
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import aiohttp
import orjson

from megarl.io.http_calls import PLAIN, read_at_most
from megarl.io.tls import trusted
from megarl.io.traces import add_parent
from megarl.rollout.pool.joined import SHORT, Joined
from megarl.rollout.pool.pool_server import (
    Ask,
    FailedInside,
    NoFilesLeft,
    PoolServer,
    Refused,
    Senseless,
    ServerFailed,
    TakenOut,
    Unreachable,
    Untrustworthy,
)
from megarl.rollout.protocol import (
    KEEP_ALIVE_S,
    ORDER_BYTES,
    ROUTING_KEY,
    Reply,
    Route,
    SamplingParams,
    auth_headers,
    completion_bytes,
    error_message,
    generate_body,
    parse_replies,
)
from megarl.rollout.settings import GenerationSettings
from megarl.rollout.wire_columns import ColumnsLost
from megarl.samples.sample import Completion, VersionSpan

_JSON = {"Content-Type": "application/json"}
_CONNECT_S = 10.0
GRACE_S = 10.0  # within this time a server returns the tokens of a request that was aborted
_FAULTS_OF_THE_REQUEST = (400, 413, 422)


class Changes:
    """Wakes those that wait for the next change of a server's state."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def announce(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float | None) -> None:
        """Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):  # wait_for of Python 3.11 swallows a cancellation that meets the event
            await self._event.wait()


class Sender:
    """Example: async with Sender(token, settings, ...) as sender: await sender.send(ask)

    `is_crowded`: whether requests wait for their turn.  `slack`: see PoolServer.rank_for.
    """

    def __init__(self, token: str, settings: GenerationSettings, *, is_crowded: Callable[[], bool], slack: int) -> None:
        self._token = token
        self._settings = settings
        self._slack = slack
        self._timeout_s = settings.timeout_s
        self.joined = Joined(self._post, is_crowded)
        self.changes = Changes()
        self._name, self._numbers = uuid.uuid4().hex, itertools.count()  # of this sender, of its requests
        self._errands: set[asyncio.Task[None]] = set()
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Sender:
        self._http = aiohttp.ClientSession(
            headers={**PLAIN, **auth_headers(self._token)},
            auto_decompress=False,
            # The pool's slots limit the connections; a limit here would let the order to end a request wait.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(_CONNECT_S, self._timeout_s)),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for errand in self._errands:
            errand.cancel()
        await self._session.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._http is not None, "enter the pool first: async with pool"
        return self._http

    async def send(self, ask: Ask) -> tuple[Completion, bool]:
        """The completion, of at least one token, and whether its cache may have given it KV of other weights.

        Raises ServerFailed, Unreachable, TakenOut or ColumnsLost if another attempt may help, Refused if perhaps not.
        """
        server, request = ask.server, ask.request
        params = request.params
        num_known = request.num_known
        num_asked = len(request.prompt_ids)
        salt_version = self._salt_version(ask)
        columns = [c for c in self._settings.columns if c.is_of(params.temperature, params.top_p, params.top_k)]
        ask.rid = f"{next(self._numbers)}-{self._name}"  # none is the beginning of another: SGLang aborts by beginnings
        ask.dp_rank = server.rank_for(request.affinity, self._slack)
        ask.timer = asyncio.get_running_loop().call_later(self._timeout_s, self._end, ask)
        body = generate_body(
            request.prompt_ids,
            1,
            params,
            ask.rid,
            self._salt(ask, salt_version),
            columns=columns,
            num_known=num_known,
            dp_rank=ask.dp_rank,
        )
        adapter = server.state.adapter  # of now: a push may change it before the reply comes
        if adapter is not None:
            body["lora_path"] = adapter
        most_bytes, sent = completion_bytes(num_asked, params, columns), object()
        if self._settings.joins and params.max_new_tokens <= SHORT and adapter is None:
            reply, sent = await self.joined.ask(server.url, body, most_bytes)
        else:
            reply = await self._post(server.url, body, most_bytes, request.affinity.key if request.affinity else "")
        ask.stop_clock()
        try:
            (parsed,) = parse_replies(reply, 1, num_asked=num_asked, columns=columns, num_known=num_known)
            self._check(parsed, ask.rid, params)
        except ColumnsLost as error:
            ask.num_tokens = error.num_tokens
            raise
        except ValueError as error:
            raise Senseless(str(error), sent) from error
        completion = self._accept(ask, parsed, has_adapter=adapter is not None)
        if server.unverified(completion):
            await self._verify(server, completion)
        # A push that the salt does not know of ended before the first token.  The KV in the cache may be older, or of
        # another request of this salt with the new weights: the reply does not say.
        is_other = salt_version not in (None, completion.versions[0].version)
        return completion, request.began is None and is_other and bool(parsed.cached_tokens)

    @staticmethod
    def _accept(ask: Ask, reply: Reply, *, has_adapter: bool) -> Completion:
        """Count the tokens of a reply.  Raises an error if there is none, or if it has older weights than it should."""
        server, completion = ask.server, reply.completion
        ask.num_tokens = num_tokens = len(completion.token_ids)
        if not num_tokens:
            raise TakenOut if ask.is_excused else ServerFailed("it ended the request before the first token")
        server.succeeded()
        server.num_tokens += num_tokens
        server.generated_s += time.monotonic() - ask.begun
        ask.done = ask.so_far(num_tokens, reply.cached_tokens or 0)
        if has_adapter and ask.version is not None:  # the server reports the version of the base weights
            completion = replace(completion, versions=(VersionSpan(ask.version, 0, num_tokens),))
        if ask.version is not None and (oldest := completion.versions[0].version) < ask.version:
            raise Untrustworthy(
                f"it generated with weights version {oldest} although it was given version {ask.version}"
            )
        return completion

    def _salt_version(self, ask: Ask) -> int | None:
        """The version of the weights whose KV a request may get from the cache; None: salts are not used.

        The KV of other runs and of earlier weights is not used, except that with which the completion itself began.  On
        a server that still has older weights the request gets their salt: under each salt no server holds KV of weights
        before that version.  Salts from before a fence are not used again: KV of weights that failed their check may be
        in the cache.
        """
        trusted_versions, began = ask.server.trusted, ask.request.began
        if not self._settings.salted or not trusted_versions:
            return None
        newest = max(trusted_versions)
        return newest if began is None else max(min(newest, began), min(trusted_versions))

    def _salt(self, ask: Ask, version: int | None) -> str | None:
        if version is None:
            return None
        return f"{self._name}.{version}.{ask.rid}" if ask.request.alone else f"{self._name}.{version}"

    def _check(self, reply: Reply, rid: str, params: SamplingParams) -> None:
        """Raises ValueError for a completion that cannot be one of this request."""
        tokens = reply.completion.token_ids
        if reply.rid is not None and reply.rid != rid and reply.rid.endswith(self._name):  # a router may name it anew
            raise ValueError(f"the reply is one to request {reply.rid}, not to {rid}")
        if len(tokens) > params.max_new_tokens:
            raise ValueError(f"a completion has {len(tokens)} tokens, and {params.max_new_tokens} at most were wanted")
        num_ids = self._settings.num_ids
        if num_ids is not None and tokens and max(tokens) >= num_ids:
            raise ValueError(f"a completion holds the token id {max(tokens)}: expected 0 .. {num_ids - 1}")

    async def _verify(self, server: PoolServer, completion: Completion) -> None:
        """Return once all its versions are trusted; a fence ends this wait."""
        deadline = time.monotonic() + self._timeout_s
        while unverified := server.unverified(completion):
            try:
                await self.changes.wait(deadline - time.monotonic())
            except TimeoutError:
                if server.is_held:  # during a push no time limit ends
                    deadline = time.monotonic() + self._timeout_s
                    continue
                raise ServerFailed(f"it generated with unverified weights (version {unverified[0]})") from None

    def _request(
        self, url: str, route: Route, body: object, key: str = ""
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers = {**_JSON, ROUTING_KEY: key} if key else {**_JSON}
        add_parent(headers)
        data, ssl = orjson.dumps(body), trusted(url, self._token)
        return self._session.post(url + route, data=data, headers=headers, allow_redirects=False, ssl=ssl)

    async def _post(self, url: str, body: dict[str, Any], most_bytes: int, key: str = "") -> Any:
        try:
            async with self._request(url, Route.GENERATE, body, key) as reply:
                if reply.status != 200:
                    said = (await read_at_most(reply, ORDER_BYTES)).decode(errors="replace")
                    message = error_message(said, reply.reason or "")
                    raise _refusal(reply.status, message, adapter=body.get("lora_path"))
                return orjson.loads(await read_at_most(reply, most_bytes))
        except aiohttp.ClientSSLError as error:  # a wrong certificate does not heal by itself
            raise ServerFailed(f"{type(error).__name__} {error}") from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise NoFilesLeft(_files(error)) from error
            raise Unreachable(f"{type(error).__name__} {error}") from error
        except ValueError as error:  # a body that is no JSON, nested too deeply, or too large
            raise Senseless(f"{type(error).__name__} {error}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerFailed(f"{type(error).__name__} {error}") from error

    def bring_back(self, ask: Ask) -> None:
        """Its server leaves: end the request, which is tried elsewhere if the server does not return it soon."""
        ask.stop_clock()
        if ask.rid:
            self._run(self._abort(ask.server.url, ask.rid))
        ask.timer = asyncio.get_running_loop().call_later(min(GRACE_S, self._timeout_s), ask.cut, TakenOut())

    def hurry(self, ask: Ask) -> None:
        """Let the server return what it has generated, for all that travels together, before the time is over."""
        together = self.joined.beside(ask.rid)
        for each in ask.server.asks:
            if each.rid in together:
                each.is_overdue = True
                self._run(self._abort(ask.server.url, each.rid))

    def _end(self, ask: Ask) -> None:
        """End a request whose time is over: the server returns what it has generated."""
        if ask.server.is_held:  # it may be paused, and returns nothing before it goes on
            ask.timer = asyncio.get_running_loop().call_later(self._timeout_s, self._end, ask)
            return
        if not ask.is_overdue:  # else it was ended before, perhaps with another one that travels with it
            self.hurry(ask)
        self._await_end(ask)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        errand = asyncio.get_running_loop().create_task(work)
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)

    def _await_end(self, ask: Ask) -> None:
        """Cut the request off if the server does not return it soon."""
        ask.timer = asyncio.get_running_loop().call_later(min(GRACE_S, self._timeout_s), self._cut, ask)

    def _cut(self, ask: Ask) -> None:
        if ask.server.is_held:
            self._await_end(ask)
        elif ask.is_hung:
            ask.cut(Untrustworthy(f"no answer within {self._timeout_s:g} s, and no token for any other request"))
        else:
            ask.cut(ServerFailed(f"no answer within {self._timeout_s:g} s"))

    async def _abort(self, url: str, rid: str) -> None:
        # The request is cut off if this does not help.
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(GRACE_S), self._request(url, Route.ABORT, {"rid": rid, "abort_all": False}):
                pass


def _refusal(status: int, message: str, *, adapter: str | None) -> RuntimeError:
    """The error for a status.

    `adapter`: that the request selects.  SGLang's own limit of a running request is a 503 too, but an attempt.
    """
    lacks_adapter = adapter is not None and adapter in message and " loaded" in message  # until the next push
    if lacks_adapter or (status == 503 and "running timeout" not in message.lower()):
        return Unreachable(f"status {status}: {message}")
    if status in _FAULTS_OF_THE_REQUEST:
        return Refused(f"status {status}: {message}")
    return (FailedInside if status == 500 else ServerFailed)(f"status {status}: {message}")


def _files(error: OSError) -> str:
    """The sentence for a process, or a machine, without open files."""
    if error.errno == errno.ENFILE:
        return "rollout.max_in_flight: this machine has no open file left for a request; expected a larger fs.file-max"
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"rollout.max_in_flight: each request needs an open file, and this process may open {most}; expected fewer "
        "requests at a time, or a larger limit (ulimit -n)"
    )
