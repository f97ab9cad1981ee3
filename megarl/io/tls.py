"""TLS between the processes of a run: certificates made from a secret, and what each side trusts.

All who know a secret derive the same certificate authority from it, an Ed25519 key, so that nothing has to be sent to
another machine.  Each process makes a key of its own, and a certificate that the authority signs.  `trusted` is for
https to servers, with the servers' key; `peer_context` for connections of which both sides have a token.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache, lru_cache
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from megarl.io.sockets import address_in, is_network_private

PEER = "megarl"  # the name in the certificates of processes, wherever they run
PLAIN, ENCRYPTED = "megarl/plain", "megarl/encrypted"  # what follows the handshake of two processes
# Clocks of machines differ.  The end means "no well-defined expiration date" (RFC 5280, 4.1.2.5).
_FROM, _TO = datetime(2020, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
_AUTHORITY = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "servers of a megarl run")])
_SERVER = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a server of a megarl run")])
_SIGNS = x509.KeyUsage(False, False, False, False, False, True, False, False, False)  # only key_cert_sign


def authority_certificate(key: str) -> bytes:
    """The certificate of the authority of those with this key, in PEM; the same wherever it is made."""
    private = _authority(key)
    made = _builder(_AUTHORITY, private.public_key(), private, serial=1)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return made.add_extension(_SIGNS, critical=True).sign(private, None).public_bytes(Encoding.PEM)


def server_certificate(key: str, hosts: Sequence[str]) -> bytes:
    """A new private key and its certificate for these addresses and names, in PEM."""
    private, authority = Ed25519PrivateKey.generate(), _authority(key)
    made = _builder(_SERVER, private.public_key(), authority, serial=x509.random_serial_number())
    made = made.add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    written = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return written + made.sign(authority, None).public_bytes(Encoding.PEM)


def trusted(url: str, key: str) -> ssl.SSLContext:
    """What a client with the servers' key trusts at this url: the authority of the key, for the host of the url.

    Besides it the certificates in the file that SSL_CERT_FILE names, for servers to which the user gave another one.
    Without that file the public ones, for host names only: no public authority vouches for the addresses of a run.
    """
    by_address = address_in(urlsplit(url).hostname or "") is not None
    return _context(key, others=not by_address or bool({"SSL_CERT_FILE", "SSL_CERT_DIR"} & os.environ.keys()))


@cache
def _context(key: str, *, others: bool) -> ssl.SSLContext:
    """Cached: reading the public certificates takes longer than most calls, and many clients are made."""
    if others:
        context = ssl.create_default_context(
            cafile=os.environ.get("SSL_CERT_FILE"), capath=os.environ.get("SSL_CERT_DIR")
        )
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority_certificate(key).decode())
    return context


def peer_context(token: str, *, calls: bool) -> ssl.SSLContext:
    """For connections of which both sides know the token; `calls`: the side that connects.

    The handshake fails unless both sides have a certificate of the token's authority.  It agrees on PLAIN if both are
    on a private network, else on ENCRYPTED.
    """
    return _peer_context(token, calls, (PLAIN, ENCRYPTED) if is_network_private() else (ENCRYPTED,))


@lru_cache(maxsize=32)
def _peer_context(token: str, calls: bool, follows: tuple[str, ...]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if calls else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED  # also of callers
    context.load_verify_locations(cadata=authority_certificate(token).decode())
    with os.fdopen(os.memfd_create("certificate"), "wb", buffering=0) as file:  # the private key is on no disk
        file.write(server_certificate(token, [PEER]))
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    if not calls:
        context.num_tickets = 0  # no session is resumed
    context.set_alpn_protocols(list(follows))
    return context


def _authority(key: str) -> Ed25519PrivateKey:
    secret = HKDF(SHA256(), 32, salt=None, info=b"megarl authority of the servers").derive(key.encode())
    return Ed25519PrivateKey.from_private_bytes(secret)


def _builder(
    subject: x509.Name, public: Ed25519PublicKey, signer: Ed25519PrivateKey, *, serial: int
) -> x509.CertificateBuilder:
    made = x509.CertificateBuilder(_AUTHORITY, subject, public, serial, _FROM, _TO)
    made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return made.add_extension(issuer, critical=False)


def _general_name(host: str) -> x509.GeneralName:
    address = address_in(host)
    return x509.DNSName(host) if address is None else x509.IPAddress(address)
