"""One request to one server: sends it, ends it in time, reads the reply, and waits until its weights are verified."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import resource
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import aiohttp
import orjson

from megarl.network.http_calls import PLAIN, read_at_most
from megarl.network.tls import trusted
from megarl.rollout.pool.joined import SHORT, Joined
from megarl.rollout.pool.pool_server import (
    Affinity,
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
    ROUTING_KEY,
    Reply,
    Route,
    SamplingParams,
    auth_headers,
    error_message,
    generate_body,
    parse_replies,
)
from megarl.rollout.reply_sizes import ORDER_BYTES, completion_bytes
from megarl.rollout.wire_columns import ColumnsLost, EngineColumn
from megarl.sample import Completion, VersionSpan

_JSON = {"Content-Type": "application/json"}
_CONNECT_S = 10.0
GRACE_S = 10.0  # a server that was told to end a request returns its tokens within this time
_FAULTS_OF_THE_REQUEST = (400, 413, 422)


class TrustChanged:
    """Wakes those that wait for the next `trust` or `fence`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float | None) -> None:
        """Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):  # wait_for of Python 3.11 swallows a cancellation that meets the event
            await self._event.wait()


class Sender:
    """Example: async with Sender(token, 120, salted=True) as sender: await sender.write(server, ask, [5, 6], params)

    `timeout_s`: of a request; then the server is told to return what it has written so far.  `columns`: what is to
    travel with the tokens of every request.  `num_ids`: of the model's vocabulary; None: not known.  `joins`: short
    answers that are asked for at once travel in one request, see `Joined`; of our own server only.  `is_crowded`:
    whether requests wait for their turn.  `slack`: see PoolServer.rank_for.
    """

    def __init__(
        self,
        token: str,
        timeout_s: float,
        *,
        salted: bool,
        columns: Sequence[EngineColumn] = (),
        num_ids: int | None = None,
        joins: bool = False,
        is_crowded: Callable[[], bool] = lambda: False,
        slack: int = 1,
    ) -> None:
        self._token, self._timeout_s, self._salted, self._columns = token, timeout_s, salted, columns
        self._slack = slack
        self._num_ids, self._joined = num_ids, Joined(self._post, is_crowded) if joins else None
        self.changed = TrustChanged()
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

    async def write(
        self,
        server: PoolServer,
        ask: Ask,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        alone: bool = False,
        num_known: int = 0,
        began: int | None = None,
        affinity: Affinity | None = None,
    ) -> tuple[Completion, bool]:
        """What the server wrote, at least one token, and whether its cache may have given it KV of other weights.

        `began`, `affinity`: see EnginePool.generate.
        `alone`: with a salt that no other request has, so that it gets no KV from the cache.  `num_known`: of so many
        tokens of the prompt the caller has the columns.
        Raises ServerFailed, Unreachable, TakenOut or ColumnsLost if another attempt may help, Refused if perhaps not.
        """
        adapter, version = server.adapter, server.newest if self._salted else None
        # KV of earlier weights is not used, nor that of another run, whose versions have the same numbers; but what the
        # completion itself began with is.  On a server that has older weights yet it gets their salt: under each salt
        # no server holds KV of weights before that version.  Salts from before a fence are not used again: what was
        # written under them, perhaps by weights that failed their check, may be in the cache still.
        if version is not None and began is not None and server.trusted:
            version = max(min(version, began), min(server.trusted))
        salt = None if version is None else f"{self._name}.{version}"
        rid = f"{next(self._numbers)}-{self._name}"  # no rid is the beginning of another: SGLang aborts by beginnings
        ask.rid = rid
        salt = f"{salt}.{rid}" if salt and alone else salt
        columns = [column for column in self._columns if column.is_of(params.temperature, params.top_p, params.top_k)]
        ask.dp_rank = rank = server.rank_for(affinity, self._slack)
        key = "" if affinity is None else affinity.key
        body = generate_body(prompt_ids, 1, params, rid, salt, columns=columns, num_known=num_known, dp_rank=rank)
        if adapter is not None:
            body["lora_path"] = adapter[0]
        ask.timer = asyncio.get_running_loop().call_later(self._timeout_s, self._end, server, ask)
        is_short = self._joined is not None and params.max_new_tokens <= SHORT and adapter is None
        most_bytes, sent = completion_bytes(len(prompt_ids), params, columns), object()
        if self._joined is not None and is_short:
            reply, sent = await self._joined.ask(server.url, body, most_bytes)
        else:
            reply = await self._post(server.url, body, most_bytes, key)
        ask.stop_clock()
        try:
            (parsed,) = parse_replies(reply, 1, num_asked=len(prompt_ids), columns=columns, num_known=num_known)
            self._check(parsed, rid, params)
        except ColumnsLost as error:
            ask.num_tokens = error.num_tokens
            raise
        except ValueError as error:
            raise Senseless(str(error), sent) from error
        completion, cached_tokens = parsed.completion, parsed.cached_tokens
        ask.num_tokens = num_tokens = len(completion.token_ids)
        if not num_tokens:
            raise TakenOut if ask.is_excused else ServerFailed("it ended the request before the first token")
        server.succeeded()
        server.num_tokens += num_tokens
        server.wrote_s += time.monotonic() - ask.begun
        ask.done = ask.so_far(num_tokens, cached_tokens or 0)
        if adapter is not None:  # the server reports the version of the base weights
            completion = replace(completion, versions=(VersionSpan(adapter[1], 0, num_tokens),))
        if ask.version is not None and (oldest := completion.versions[0].version) < ask.version:
            raise Untrustworthy(f"it wrote with weights version {oldest} although it was given version {ask.version}")
        if server.unverified(completion):
            await self._verify(server, completion)
        # A push of which the salt does not know ended before the first token.  Whether the KV in the cache was older is
        # not in the reply: another request of this salt may just have written it with the new weights.
        is_stale = began is None and version not in (None, completion.versions[0].version) and bool(cached_tokens)
        return completion, is_stale

    def _check(self, reply: Reply, rid: str, params: SamplingParams) -> None:
        """Raises ValueError for a completion that cannot be one of this request."""
        tokens = reply.completion.token_ids
        if reply.rid is not None and reply.rid != rid and reply.rid.endswith(self._name):  # a router may name it anew
            raise ValueError(f"the reply is one to request {reply.rid}, not to {rid}")
        if len(tokens) > params.max_new_tokens:
            raise ValueError(f"a completion has {len(tokens)} tokens, and {params.max_new_tokens} at most were wanted")
        if self._num_ids is not None and tokens and max(tokens) >= self._num_ids:
            raise ValueError(f"a completion holds the token id {max(tokens)}: expected 0 .. {self._num_ids - 1}")

    async def _verify(self, server: PoolServer, completion: Completion) -> None:
        """Return once all its versions are trusted; a fence ends this wait."""
        deadline = time.monotonic() + self._timeout_s
        while unverified := server.unverified(completion):
            try:
                await self.changed.wait(deadline - time.monotonic())
            except TimeoutError:
                if server.held:  # during a push no time limit ends
                    deadline = time.monotonic() + self._timeout_s
                    continue
                raise ServerFailed(f"it wrote with unverified weights (version {unverified[0]})") from None

    def _send(
        self, url: str, route: Route, body: object, key: str = ""
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        how: dict[str, Any] = {"allow_redirects": False, "ssl": trusted(url, self._token)}
        headers = {**_JSON, ROUTING_KEY: key} if key else _JSON
        return self._session.post(url + route, data=orjson.dumps(body), headers=headers, **how)

    async def _post(self, url: str, body: dict[str, Any], most_bytes: int, key: str = "") -> Any:
        try:
            async with self._send(url, Route.GENERATE, body, key) as reply:
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

    def bring_back(self, server: PoolServer, ask: Ask) -> None:
        """Its server leaves: it is to return what it has written, and is tried elsewhere if it does not do so soon."""
        ask.stop_clock()
        if ask.rid:
            self._run(self._abort(server.url, ask.rid))
        ask.timer = asyncio.get_running_loop().call_later(min(GRACE_S, self._timeout_s), ask.cut, TakenOut())

    def hurry(self, server: PoolServer, ask: Ask) -> None:
        """The server is to return what it has written, of all that travels together, before the time is over."""
        rids = {ask.rid} if self._joined is None else self._joined.beside(ask.rid)
        for each in server.asks:
            if each.rid in rids:
                each.is_overdue = True
                self._run(self._abort(server.url, each.rid))

    def _end(self, server: PoolServer, ask: Ask) -> None:
        """The time of a request is over: the server is to return what it has written."""
        if server.held:  # it may be paused, and returns nothing before it goes on
            ask.timer = asyncio.get_running_loop().call_later(self._timeout_s, self._end, server, ask)
            return
        if not ask.is_overdue:  # else it was ended before, perhaps with another one that travels with it
            self.hurry(server, ask)
        self._await_end(server, ask)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        errand = asyncio.get_running_loop().create_task(work)
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)

    def _await_end(self, server: PoolServer, ask: Ask) -> None:
        """Cut the request off if the server does not return it soon."""
        ask.timer = asyncio.get_running_loop().call_later(min(GRACE_S, self._timeout_s), self._cut, server, ask)

    def _cut(self, server: PoolServer, ask: Ask) -> None:
        if server.held:
            self._await_end(server, ask)
        elif ask.is_hung:
            ask.cut(Untrustworthy(f"no answer within {self._timeout_s:g} s, and no token for any other request"))
        else:
            ask.cut(ServerFailed(f"no answer within {self._timeout_s:g} s"))

    async def _abort(self, url: str, rid: str) -> None:
        # The request is cut off if this does not help.
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(GRACE_S), self._send(url, Route.ABORT, {"rid": rid, "abort_all": False}):
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
    """Who limits the open files: this process, or its machine."""
    if error.errno == errno.ENFILE:
        return "rollout.max_in_flight: this machine has no open file left for a request; expected a larger fs.file-max"
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"rollout.max_in_flight: each request needs an open file, and this process may open {most}; expected fewer "
        "requests at a time, or a larger limit (ulimit -n)"
    )
