"""A server with a certificate: its key crosses the network sealed, and clients trust this certificate or no server."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from megarl.rollout.client import ServerClient, ServerError
from megarl.rollout.pool.pool import EnginePool, RolloutFailed
from megarl.rollout.protocol import SamplingParams
from megarl.servers.launch import TOKEN_VARIABLE
from megarl.servers.server_process import free_ports

KEY = "the key of a server"


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by itself, and its private key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a server of a test")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
    signed = made.add_extension(address, critical=False).sign(key, SHA256())
    certificate, private = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    private.write_bytes(key.private_bytes(*form))
    return certificate, private


@pytest.fixture
def served(model_path: str, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a server, and its certificate."""
    certificate, private = write_certificate(tmp_path)
    (port,) = free_ports(["127.0.0.1"])
    command = [sys.executable, "-m", "megarl.hf_server.main", "--model-path", model_path, "--port", str(port)]
    command += ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(private)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, TOKEN_VARIABLE: KEY}, stdout=log, stderr=log)
    while b"serving " not in (tmp_path / "log").read_bytes():
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    yield f"https://127.0.0.1:{port}", certificate
    process.kill()
    process.wait()


def answer(url: str) -> int:
    """How many tokens the server writes, asked as a collector asks."""

    async def ask() -> int:
        params = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
        async with EnginePool([url], KEY, timeout_s=60, rest_s=0.001, retries=0) as pool:
            return len((await pool.generate([5, 6, 7], params)).completion.token_ids)

    return asyncio.run(ask())


def test_clients_trust_the_certificate_that_they_were_given_and_no_other(
    served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, certificate = served
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ServerError, match="CERTIFICATE_VERIFY_FAILED"):
        ServerClient(url, KEY).model_info()
    with pytest.raises(RolloutFailed):
        answer(url)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert ServerClient(url, KEY).model_info()["is_generation"] is True
    assert answer(url) == 6
