"""What somebody between a run and its servers sees, what of a server's private key shows, and whom clients trust."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from tiny_server import TOKEN, Served

from megarl.io.sockets import listen
from megarl.io.tls import authority_certificate, server_certificate
from megarl.rollout.client import ServerClient, ServerError
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.pool.pool_server import PieceRequest, RolloutFailed
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.settings import GenerationSettings
from megarl.servers.launch import TOKEN_VARIABLE, EngineLaunch
from megarl.servers.server_process import free_ports
from megarl.servers.supervisor import Servers

PROMPT = [11, 12, 13, 14, 15, 16, 17]
LISTS = [b"[11,12,13,14,15,16,17", b"[11, 12, 13, 14, 15, 16, 17"]


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def with_tls(model_path: str, log_dir: Path) -> Iterator[Servers]:
    """A server with https, as on a machine of its own."""
    launch = EngineLaunch("hf", model_path, host="127.0.0.2", tls="always")
    with Servers([launch], TOKEN, log_dir) as servers:
        servers.start()
        yield servers


@contextmanager
def between(url: str) -> Iterator[tuple[str, bytearray]]:
    """The address of a machine between clients and this server, and what it sees of all that goes through it."""
    parts, seen = urlsplit(url), bytearray()

    def forward(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):  # one of them has closed its end
            while data := one.recv(2**16):
                seen.extend(data)
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with suppress(OSError):  # closed
            while True:
                caller, server = listener.accept()[0], socket.create_connection((parts.hostname, parts.port))
                for ends in ((caller, server), (server, caller)):
                    threading.Thread(target=forward, args=ends, daemon=True).start()

    with listen(str(parts.hostname)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"{parts.scheme}://{parts.hostname}:{listener.getsockname()[1]}", seen


def collect(url: str, key: str = TOKEN) -> None:
    """As a collector."""

    async def complete() -> None:
        params = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)
        async with EnginePool([url], key, GenerationSettings(timeout_s=60, rest_s=0.001, retries=0)) as pool:
            assert len((await pool.generate(PieceRequest(PROMPT, params))).completion.token_ids) == 4

    asyncio.run(complete())


def use(url: str, key: str = TOKEN) -> None:
    """As a collector and as a trainer."""
    collect(url, key)
    with closing(ServerClient(url, key)) as client:
        client.health()
        assert len(client.prompt_log_probs(PROMPT)) == len(PROMPT) - 1


def test_who_is_between_a_run_and_its_server_sees_neither_the_key_nor_a_prompt(
    with_tls: Servers, hf_served: Served
) -> None:
    with between(hf_served.url) as (url, sees_http):
        use(url)
    assert TOKEN.encode() in sees_http
    assert any(prompt in sees_http for prompt in LISTS)

    assert with_tls.urls[0].startswith("https://127.0.0.2:")
    with between(with_tls.urls[0]) as (url, sees_https):
        use(url)
    assert len(sees_https) > 1000, "all of it went through"
    assert TOKEN.encode() not in sees_https
    assert not any(prompt in sees_https for prompt in LISTS)


def test_a_server_with_https_answers_nobody_without_it(with_tls: Servers) -> None:
    parts = urlsplit(with_tls.urls[0])
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in plain.recv(100)


def test_a_client_sends_nothing_to_a_server_of_another_run(with_tls: Servers) -> None:
    with between(with_tls.urls[0]) as (url, sees), closing(ServerClient(url, "the key of another run")) as client:
        with pytest.raises(ServerError, match="CERTIFICATE_VERIFY_FAILED"):
            client.health()
        assert b"the key of another run" not in sees


def test_the_private_key_is_in_no_file_and_in_no_word_of_the_process(with_tls: Servers, log_dir: Path) -> None:
    """It is in memory, in an open file that only processes of the user can open."""
    pid = with_tls.pids[0]
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


OTHER = "the key of the server whose certificate is the user's"  # what a process trusts is kept by the key


@pytest.fixture
def served(model_path: str, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a server, and the certificate of the authority that vouches for it."""
    (tmp_path / "server.pem").write_bytes(server_certificate("of the user", ["127.0.0.1"]))  # with its private key
    (tmp_path / "authority.pem").write_bytes(authority_certificate("of the user"))
    (port,) = free_ports(["127.0.0.1"])
    command = [sys.executable, "-m", "megarl.hf_server.main", "--model-path", model_path, "--port", str(port)]
    command += [f"--ssl-{what}file={tmp_path / 'server.pem'}" for what in ("cert", "key")]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, TOKEN_VARIABLE: OTHER}, stdout=log, stderr=log)
    while b"serving " not in (tmp_path / "log").read_bytes():
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    yield f"https://127.0.0.1:{port}", tmp_path / "authority.pem"
    process.kill()
    process.wait()


@pytest.mark.full
def test_clients_trust_the_certificate_that_they_were_given_and_no_other(
    served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, certificate = served
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ServerError, match="CERTIFICATE_VERIFY_FAILED"):
        ServerClient(url, OTHER).model_info()
    with pytest.raises(RolloutFailed):
        collect(url, OTHER)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    use(url, OTHER)
