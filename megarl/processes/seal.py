"""Records of a connection: each is encrypted and authenticated with AES-256-GCM, under a key for its direction.

A record is the length of its ciphertext (4 bytes, authenticated too) and the ciphertext with its tag.  The nonce is the
number of the record in its direction; it is not sent.  So a record that was changed, left out, repeated, moved or sent
back to its sender cannot be opened.
"""

from __future__ import annotations

from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

Bytes = bytes | bytearray | memoryview

HEAD = 4  # bytes of a record before its ciphertext
LARGEST = 256 * 2**10  # bytes that a record holds: a buffer that fits a processor's cache
_KEY, _NONCE, _TAG = 32, 12, 16  # bytes


class Keys(NamedTuple):
    """Of one end of a connection; the other end has them in the other order."""

    send: bytes
    receive: bytes

    def of_peer(self) -> Keys:
        return Keys(self.receive, self.send)


def caller_keys(token: str, challenges: str) -> Keys:
    """The keys of the end that called, from the token and the random challenges of both ends."""
    both = HKDF(SHA256(), 2 * _KEY, salt=challenges.encode(), info=b"megarl connection").derive(token.encode())
    return Keys(both[:_KEY], both[_KEY:])


class Sealer:
    """One direction of a connection, at the end that sends."""

    def __init__(self, key: bytes) -> None:
        self._cipher, self._count = AESGCM(key), 0

    def seal(self, data: Bytes) -> bytes:
        """The next record, with at most LARGEST bytes of data."""
        assert len(data) <= LARGEST, "longer data is split"
        head = (len(data) + _TAG).to_bytes(HEAD)
        sealed = self._cipher.encrypt(self._count.to_bytes(_NONCE), data, head)
        self._count += 1
        return head + sealed


class Opener:
    """One direction of a connection, at the end that receives."""

    def __init__(self, key: bytes) -> None:
        self._cipher, self._count = AESGCM(key), 0

    def size(self, head: Bytes) -> int:
        """Bytes that follow the head of a record.  Raises ValueError for no head of ours."""
        size = int.from_bytes(head)
        if not _TAG < size <= LARGEST + _TAG:
            raise ValueError(f"a record of {size} bytes; expected at most {LARGEST + _TAG}")
        return size

    def open(self, head: Bytes, sealed: Bytes) -> bytes:
        """The data of the next record.  Raises ValueError if the peer did not send it as the next one."""
        try:
            data = self._cipher.decrypt(self._count.to_bytes(_NONCE), sealed, head)
        except InvalidTag as error:
            raise ValueError("a record was not sealed by the peer, or is not the next one") from error
        self._count += 1
        return data
