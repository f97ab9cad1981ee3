"""What somebody between a run and its servers sees, and what of a server's private key is anywhere to be seen."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from tiny_server import TOKEN, Served

from megarl.network.sockets import listen
from megarl.rollout.client import ServerClient, ServerError
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.protocol import SamplingParams
from megarl.servers.launch import EngineLaunch
from megarl.servers.supervisor import Servers

PROMPT = [11, 12, 13, 14, 15, 16, 17]
LISTS = [b"[11,12,13,14,15,16,17", b"[11, 12, 13, 14, 15, 16, 17"]


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def sealed(model_path: str, log_dir: Path) -> Iterator[Servers]:
    """A server with https, as on a machine of its own."""
    launch = EngineLaunch("hf", model_path, host="127.0.0.2", tls="always")
    with Servers([launch], TOKEN, log_dir) as servers:
        servers.start()
        yield servers


class Between:
    """A machine between client and server, which reads all that goes through it."""

    def __init__(self, host: str, port: int) -> None:
        self.seen = bytearray()
        self._there, self._listener = (host, port), listen(host)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                caller = self._listener.accept()[0]
            except OSError:  # closed
                return
            server = socket.create_connection(self._there)
            for one, other in ((caller, server), (server, caller)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):  # one of them has closed its end
            while data := one.recv(2**16):
                self.seen += data
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


@contextmanager
def between(url: str) -> Iterator[tuple[str, Between]]:
    """The address of somebody before this server."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    with closing(Between(parts.hostname, parts.port)) as found:
        yield f"{parts.scheme}://{parts.hostname}:{found.port}", found


def use(url: str) -> None:
    """As a collector and as a trainer."""

    async def complete() -> None:
        params = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)
        async with EnginePool([url], TOKEN, timeout_s=60) as pool:
            assert len((await pool.generate(PROMPT, params)).completion.token_ids) == 4

    asyncio.run(complete())
    with closing(ServerClient(url, TOKEN)) as client:
        client.health()
        assert len(client.prompt_log_probs(PROMPT)) == len(PROMPT) - 1


def test_who_is_between_a_run_and_its_server_sees_neither_the_key_nor_a_prompt(
    sealed: Servers, hf_served: Served
) -> None:
    with between(hf_served.url) as (url, sees_http):
        use(url)
    assert TOKEN.encode() in sees_http.seen
    assert any(prompt in sees_http.seen for prompt in LISTS)

    assert sealed.urls[0].startswith("https://127.0.0.2:")
    with between(sealed.urls[0]) as (url, sees_https):
        use(url)
    assert len(sees_https.seen) > 1000, "all of it went through"
    assert TOKEN.encode() not in sees_https.seen
    assert not any(prompt in sees_https.seen for prompt in LISTS)


def test_a_server_with_https_answers_nobody_without_it(sealed: Servers) -> None:
    parts = urlsplit(sealed.urls[0])
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in plain.recv(100)


def test_a_client_sends_nothing_to_a_server_of_another_run(sealed: Servers) -> None:
    with between(sealed.urls[0]) as (url, sees), closing(ServerClient(url, "the key of another run")) as client:
        with pytest.raises(ServerError, match="CERTIFICATE_VERIFY_FAILED"):
            client.health()
        assert b"the key of another run" not in sees.seen


def test_the_private_key_is_in_no_file_and_in_no_word_of_the_process(sealed: Servers, log_dir: Path) -> None:
    """It is in memory, in an open file that only processes of the user can open."""
    pid = sealed.pids[0]
    process = psutil.Process(pid)
    (path,) = {word for word in process.cmdline() if word.startswith("/proc/self/fd/")}
    real = Path(path.replace("self", str(pid)))
    assert str(real.readlink()).startswith("/memfd:")
    body = real.read_bytes()
    assert body.startswith(b"-----BEGIN PRIVATE KEY-----")
    secret = body.splitlines()[1]
    assert secret not in " ".join(process.cmdline()).encode() + repr(process.environ()).encode()
    logs = list(log_dir.iterdir())
    assert logs and not any(secret in log.read_bytes() for log in logs)


@pytest.mark.parametrize(
    ("tls", "host", "scheme"),
    [
        ("auto", "127.0.0.1", "http"),
        ("auto", "::1", "http"),
        ("auto", "localhost", "http"),
        ("auto", "10.0.0.2", "https"),
        ("auto", "gpu-07", "https"),
        ("never", "10.0.0.2", "http"),
        ("always", "127.0.0.1", "https"),
    ],
)
def test_servers_that_other_machines_reach_have_https(tls: str, host: str, scheme: str) -> None:
    assert urlsplit(EngineLaunch("hf", "", host=host, port=1, tls=tls).url).scheme == scheme
