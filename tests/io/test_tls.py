"""Certificates made from the servers' key, in real handshakes: who is trusted at which address."""

import ssl
from pathlib import Path

import pytest

from megarl.io.tls import authority_certificate, server_certificate, trusted

KEY = "the key of these servers"


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> None:
    """Until both ends are done.  Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname=host)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    waiting = [one, other]
    while waiting:
        for end in list(waiting):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(end)


def serving(folder: Path, key: str, *hosts: str) -> ssl.SSLContext:
    file = folder / "server.pem"
    file.write_bytes(server_certificate(key, hosts))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context


@pytest.fixture(autouse=True)
def no_certificates_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "gpu-07"])
def test_a_client_with_the_key_trusts_a_server_with_the_key_at_its_address(host: str, tmp_path: Path) -> None:
    client = trusted(f"https://[{host}]:1" if ":" in host else f"https://{host}:1", KEY)
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # Python's default from 3.13 on
    handshake(client, serving(tmp_path, KEY, "127.0.0.9", host), host)


@pytest.mark.parametrize("key, host", [("another key", "127.0.0.2"), (KEY, "127.0.0.3")], ids=["key", "host"])
def test_a_server_with_another_key_or_at_another_address_is_refused(key: str, host: str, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(trusted("https://127.0.0.2:1", KEY), serving(tmp_path, key, host), "127.0.0.2")


def test_a_certificate_of_a_server_signs_no_other(tmp_path: Path) -> None:
    """Else whoever takes a server's private key could be any server."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(cadata=server_certificate(KEY, ["127.0.0.2"]).decode())
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client, serving(tmp_path, KEY, "127.0.0.2"), "127.0.0.2")


def test_all_with_the_key_make_the_same_authority_and_public_ones_vouch_for_names_only() -> None:
    assert authority_certificate(KEY) == authority_certificate(KEY) != authority_certificate("another key")
    assert len(trusted("https://10.0.0.1:1", KEY).get_ca_certs()) == 1
    assert len(trusted("https://gpu-07:1", KEY).get_ca_certs()) > 1


def test_the_users_certificates_are_trusted_besides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.pem").write_bytes(authority_certificate("the user's own"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "own.pem"))
    client = trusted("https://127.0.0.2:1", "a key of this test alone")
    for key in ("the user's own", "a key of this test alone"):
        handshake(client, serving(tmp_path, key, "127.0.0.2"), "127.0.0.2")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client, serving(tmp_path, KEY, "127.0.0.2"), "127.0.0.2")
