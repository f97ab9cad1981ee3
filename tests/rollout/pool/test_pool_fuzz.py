"""The pool against replies that hypothesis has spoilt: each is a sample of a batch, or an attempt that failed."""

import asyncio
import copy
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pools import pool_of
from states import fenced, trusted

from megarl.data.batch import make_batch
from megarl.rollout.engine_columns import EngineSupport
from megarl.rollout.pool.pool import Piece
from megarl.rollout.pool.pool_server import PieceRequest
from megarl.rollout.protocol import SAMPLING_LOG_PROBS, SamplingParams, parse_replies
from megarl.rollout.wire_columns import column_to_json
from megarl.samples.ragged import COUNTS
from megarl.samples.sample import SUPPORT, Prompt, Sample

NUM_MUTATIONS = 400
NUM_IDS = 32
PROMPT = [3, 4, 5]
PARAMS = SamplingParams(max_new_tokens=6, top_p=0.9, top_k=4)
COLUMNS_OF_RUN = [EngineSupport(PARAMS.top_p, PARAMS.top_k, NUM_IDS)]
LAST_RID = "the id of the request"  # in a mutation: replaced by that of the request
OF_ANOTHER = "the id of another request"

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 7, 10**12, -(10**400), 2**63, 0.5, -1e300, math.nan, math.inf, -math.inf]),
    st.sampled_from(["", "0", "NaN", "stop", "\x00", "null", OF_ANOTHER, [], {}, [[]], [None], {"type": 1}]),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-2, 40), max_size=8),
    st.just([[[[[[[[[[]]]]]]]]]]),
)


def valid_reply() -> dict[str, Any]:
    tokens = [4, 9, 1]
    meta: dict[str, Any] = {"id": LAST_RID, "finish_reason": {"type": "stop"}, "prompt_tokens": len(PROMPT)}
    meta |= {"weight_version": "7", "cached_tokens": 0, "weight_versions": [{"version": "7", "start": 0, "end": 3}]}
    meta["output_token_logprobs"] = [[-0.5 * number, token, None] for number, token in enumerate(tokens)]
    meta[SAMPLING_LOG_PROBS] = [-0.25, 0.0, -1.5]
    meta["output_token_sampling_mask"] = [[4, 5], [9], [0, 1, 2]]
    meta["columns"] = {}
    return {"output_ids": tokens, "meta_info": meta}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a JSON value, itself included."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield from places(part, (*path, key))


@st.composite
def spoilt_values(draw: st.DrawFn) -> Any:
    """The valid reply after one to three changes: another value, or one left out, or one there twice."""
    reply = {"reply": valid_reply()}
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([path for path in places(reply) if path]))
        *way, last = path
        parent: Any = reply
        for key in way:
            parent = parent[key]
        change = draw(st.sampled_from(["other", "none", "twice"]))
        if change == "twice" and isinstance(parent, list):
            parent.insert(last, copy.deepcopy(parent[last]))
        elif change == "none" and way:
            del parent[last]
        else:
            parent[last] = copy.deepcopy(draw(JUNK))  # the next change may be inside it
    return reply["reply"]


@dataclass(frozen=True)
class Spoilt:
    """What the server does with one request."""

    value: Any = field(default_factory=valid_reply)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: float = 1.0  # the share of the body that is sent
    closes: bool = False  # after it, instead of ending the reply as announced
    garbage: bytes | None = None  # instead of JSON

    async def answer(self, request: web.Request) -> web.StreamResponse:
        rid = str((await request.json())["rid"])
        text = json.dumps(self.value).replace(OF_ANOTHER, "9" + rid).replace(LAST_RID, rid)
        body = text.encode() if self.garbage is None else self.garbage
        part = body[: int(self.cut * len(body))]
        if not self.closes:
            return web.Response(status=self.status, headers=self.headers, body=part)
        response = web.StreamResponse(status=self.status, headers={**self.headers, "Content-Length": str(len(body))})
        await response.prepare(request)
        await response.write(part)
        assert request.transport is not None
        request.transport.close()
        return response


HEADERS = st.sampled_from(
    [
        {"Content-Type": "text/html"},
        {"Content-Type": "application/json; charset=no-such"},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "deflate"},
        {"Location": "/generate"},
    ]
)
STATUSES = st.sampled_from([201, 204, 301, 307, 400, 401, 404, 408, 413, 418, 422, 429, 500, 502, 503, 504, 599])
COLUMNS = st.dictionaries(  # for which nobody has asked
    st.sampled_from(["weird", "advantages", "keep", "tokens", "rows", "", SUPPORT]),
    st.sampled_from([column_to_json(np.arange(6, dtype=np.uint8)), column_to_json(np.ones((6, 2))), {}, None]),
    min_size=1,
)


def with_columns(columns: dict[str, Any]) -> dict[str, Any]:
    reply = valid_reply()
    reply["meta_info"]["columns"] = columns
    return reply


DEEP = st.builds(lambda: b"[" * 200_000)  # no parser follows it to the end
BODIES = st.one_of(st.binary(max_size=40), DEEP, st.just(b"\xff\xfe{}"), st.just(b"<html></html>"))
SPOILT = st.one_of(
    st.builds(Spoilt, value=spoilt_values()),
    st.builds(Spoilt, value=spoilt_values()),
    st.builds(Spoilt, value=st.builds(with_columns, COLUMNS)),
    st.builds(Spoilt, status=STATUSES, garbage=st.none() | BODIES),
    st.builds(Spoilt, headers=HEADERS),
    st.builds(Spoilt, cut=st.floats(0.0, 0.99), closes=st.booleans()),
    st.builds(Spoilt, garbage=BODIES),
)


class Bench:
    """A pool of a server that answers as it is told, and a good one."""

    def __init__(self) -> None:
        self.runner, self.stack = asyncio.Runner(), AsyncExitStack()
        self.spoilt = Spoilt()
        self.seen: Counter[str] = Counter()
        self.unfit: list[tuple[str, str]] = []

    async def start(self) -> None:
        async def bad(request: web.Request) -> web.StreamResponse:
            return await self.spoilt.answer(request)

        async def good(request: web.Request) -> web.StreamResponse:
            return await Spoilt().answer(request)

        how: dict[str, Any] = {"fenced": True, "num_ids": NUM_IDS, "rest_s": 0.0, "columns": COLUMNS_OF_RUN}
        pooled = pool_of(bad, good, timeout_s=60, unfit=self.unfit, **how)
        self.pool, self.urls, _ = await self.stack.enter_async_context(pooled)

    async def ask(self, spoilt: Spoilt) -> Piece:
        for url in self.urls:
            self.pool.update(trusted(url, 7))
        self.spoilt = spoilt
        asked = asyncio.create_task(self.pool.generate(PieceRequest(PROMPT, PARAMS), prefer=self.urls[0]))
        while not asked.done():
            await asyncio.sleep(0)
            if any(ask.num_tokens is not None for ask in self.pool._servers[self.urls[0]].asks):
                self.pool.update(fenced(self.urls[0]))  # it waits for the push of a version that does not come
        return await asked


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench()
    with bench.runner:
        bench.runner.run(bench.start())
        yield bench
        bench.runner.run(bench.stack.aclose())
    print(f"\n{bench.seen.total()} spoilt replies: {dict(bench.seen)}")


def assert_valid(piece: Piece) -> None:
    """What everything behind the pool relies on."""
    tokens, log_probs, versions = piece.completion.token_ids, piece.completion.log_probs, piece.completion.versions
    assert 0 < len(tokens) <= PARAMS.max_new_tokens
    assert all(type(token) is int and 0 <= token < NUM_IDS for token in tokens)
    assert len(log_probs) == len(tokens)
    assert np.isfinite(np.asarray(log_probs, dtype=np.float32)).all() and max(log_probs) <= 1e-3
    assert piece.completion.finish_reason in ("stop", "length", "abort")
    edges = [edge for span in versions for edge in (span.start, span.end)]
    assert edges == sorted(edges) and (edges[0], edges[-1]) == (0, len(tokens))
    assert {span.version for span in versions} == {7}
    prompt = Prompt("0-0", PROMPT, "")
    good = parse_replies(valid_reply(), 1, num_asked=len(PROMPT), columns=COLUMNS_OF_RUN)[0].completion
    batch = make_batch([[Sample.of(prompt, completion, 1.0) for completion in (piece.completion, good)]])
    counts = batch.columns[SUPPORT + COUNTS].tolist()
    assert len(counts) == len(batch.tokens) == 2 * len(PROMPT) + len(tokens) + len(good.token_ids)
    assert all(
        bool(count) == bool(learnt) for count, learnt in zip(counts, batch.columns["response_mask"], strict=True)
    )


@settings(max_examples=NUM_MUTATIONS, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spoilt=SPOILT)
def test_a_spoilt_reply_is_a_valid_sample_or_a_failed_attempt(bench: Bench, spoilt: Spoilt) -> None:
    piece = bench.runner.run(asyncio.wait_for(bench.ask(spoilt), 60))
    assert_valid(piece)
    bench.seen["accepted" if piece.url == bench.urls[0] else "tried elsewhere"] += 1
    assert [url for url, _ in bench.unfit] in ([], [bench.urls[0]]), "of the good server nothing is said"
    del bench.unfit[:]


def test_most_spoilt_replies_were_seen_and_some_were_valid_still(bench: Bench) -> None:
    """A change may be of something that nobody reads."""
    assert bench.seen.total() >= 300
    assert bench.seen["tried elsewhere"] > bench.seen["accepted"] > 0
