"""Which certificates of https servers a client trusts."""

from __future__ import annotations

import ssl
from functools import cache

import httpx


@cache
def certificates() -> ssl.SSLContext:
    """The CA certificates in the file that SSL_CERT_FILE names, alone; without it the public ones.

    Cached: reading them takes longer than most calls, and many clients are made.
    """
    return httpx.create_ssl_context(trust_env=True)
