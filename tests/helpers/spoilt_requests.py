"""Requests that nobody should send: raw bytes, spoilt headers, and bodies with anything in any place."""

import copy
import json
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

DEEP: Any = []
for _ in range(900):
    DEEP = [DEEP]
LONG = b"1" + b"0" * 400
ODD = [None, True, -1, 0, 2**31, 2**63, 10**400, -(10**400), 0.5, 1e300, float("nan"), float("inf"), "", "a", "\x00"]
ODD += ["é", "1", [], {}, [[]], [None], [{}], {"a": None}, [True], [2**63], {"type": "function"}, DEEP, "[" * 50_000]
JUNK = st.sampled_from(ODD) | st.integers() | st.text(max_size=6) | st.lists(st.integers(-2, 40), max_size=4)
HEADERS = st.sampled_from(
    [
        b"Authorization: Bearer \xff",
        b"Authorization: \xc3\x28",
        b"X-Api-Key: \xed\xa0\x80",
        b"Authorization: Bearer " + b"x" * 9_000,
        b"Expect: 100-continue",
        b"Expect: nothing",
        b"Content-Length: -1",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: gzip, chunked",
        b"Content-Encoding: br",
        b"Content-Type: application/json; charset=no-such",
        b"Upgrade: websocket\r\nConnection: Upgrade",
        b"Connection: close",
        b"Host: [",
        b"A\x00B: c",
    ]
)
PATHS = st.sampled_from(
    [b"/%ff", b"/s/%ff/v1/models", b"/sessions/%00", b"//", b"*", b"/v1/../x", b"/?\xff=\xff", b"/\xff"]
)
METHODS = st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"CONNECT", b"\xff", b"get"])
CHUNKS = st.sampled_from([b"5\r\nabcde\r\n0\r\n\r\n", b"zz\r\n", b"-1\r\n", b"ffffffffffffffffff\r\na", b"5\r\nab"])


@st.composite
def spoilt_bodies(draw: st.DrawFn, bodies: Sequence[Any]) -> bytes:
    """One of the bodies after one to three changes."""
    at: dict[str, Any] = {"body": copy.deepcopy(draw(st.sampled_from(bodies)))}
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from([place for place in _places(at) if place]))
        parent: Any = at
        for key in way:
            parent = parent[key]
        parent[last] = copy.deepcopy(draw(JUNK))  # the next change may be inside it
    return json.dumps(at["body"]).encode(errors="surrogatepass")


def _places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield way
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside if len(way) < 8 else ():
        yield from _places(part, (*way, key))


def requests(paths: Sequence[str], key: str, bodies: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """As they go over the wire; most of them with the key, so that they are read."""
    known = st.sampled_from([path.encode() for path in paths])
    friend = st.just(f"Authorization: Bearer {key}".encode())
    with_body = st.builds(_request, st.just(b"POST"), known, st.tuples(friend), spoilt_bodies(bodies))
    odd = st.builds(
        _request, METHODS, known | PATHS, st.lists(HEADERS | friend, max_size=3), CHUNKS | st.binary(max_size=9)
    )
    chunked = st.builds(
        lambda path, chunks: (
            b"POST %s HTTP/1.1\r\nTransfer-Encoding: chunked\r\nAuthorization: Bearer %s\r\n\r\n%s"
            % (path, key.encode(), chunks)
        ),
        known,
        CHUNKS,
    )
    return with_body | with_body | with_body | odd | chunked | st.binary(max_size=60)


def _request(method: bytes, path: bytes, headers: Sequence[bytes], body: bytes) -> bytes:
    lines = [method + b" " + path + b" HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def request_of(path: str, key: str, body: Any) -> bytes:
    """One with a key, which may be no UTF-8 (as `surrogateescape` has it)."""
    friend = f"Authorization: Bearer {key}".encode(errors="surrogateescape")
    return _request(b"POST", path.encode(), [friend], json.dumps(body).encode())


def collected(strategy: st.SearchStrategy[bytes], count: int) -> list[bytes]:
    """So many of them, always the same."""
    found: list[bytes] = []

    @settings(max_examples=count, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(request=strategy)
    def collect(request: bytes) -> None:
        found.append(request)

    collect()
    return found


def statuses(port: int, requests: Sequence[bytes]) -> list[int | None]:
    """Of the replies; None if the connection ends without one, or if the server waits for more."""
    with ThreadPoolExecutor(32) as threads:
        return list(threads.map(partial(_status_of, port), requests))


def _status_of(port: int, request: bytes) -> int | None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock, suppress(ConnectionError, TimeoutError):
        sock.sendall(request)
        sock.settimeout(2)
        said = b""
        while part := sock.recv(65536):
            said += part
            if said.startswith(b"HTTP/1.1 100 "):
                said = said.partition(b"\r\n\r\n")[2]
            if len(said) > 12:
                return int(said[9:12])
    return None
