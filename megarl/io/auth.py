"""The run's secret token, with which its processes on several machines authenticate each other.

It is passed in the environment or in a file that only its owner can read, never on a command line.  Keys for other
purposes, such as that of the rollout servers, are derived from it, so that a leaked key does not reveal the token.
"""

from __future__ import annotations

import hashlib
import hmac
import stat
from collections.abc import Mapping
from pathlib import Path

VARIABLE, FILE_VARIABLE = "MEGARL_TOKEN", "MEGARL_TOKEN_FILE"
SERVER_VARIABLE = "MEGARL_SERVER_TOKEN"  # of servers that were started with their own key
_ENOUGH = 16  # characters


def given_token(environment: Mapping[str, str]) -> str | None:
    """The token in the environment, or in the file that it names; None if there is neither.

    Raises ValueError for a file that others can read, and for a token of fewer than 16 characters.
    """
    token, source = environment.get(VARIABLE), VARIABLE
    if token is None and (name := environment.get(FILE_VARIABLE)):
        token, source = _read(Path(name)), f"{FILE_VARIABLE}={name}"
    if token is not None:
        _require_length(token, source)
    return token


def needed_token(environment: Mapping[str, str], why: str) -> str:
    """The same, but raises ValueError if there is no token; `why` begins the message."""
    token = given_token(environment)
    if token is None:
        raise ValueError(
            f"{why}: expected the run's token in {VARIABLE}, or in a file that only you can read, in {FILE_VARIABLE}; "
            "the same on every machine"
        )
    return token


def given_server_token(environment: Mapping[str, str]) -> str | None:
    """The servers' key in the environment; None if there is none.  Raises ValueError for fewer than 16 characters.

    The servers' certificates are derived from it, so who connects to one can try keys against its certificate.
    """
    if key := environment.get(SERVER_VARIABLE):
        _require_length(key, SERVER_VARIABLE)
    return key or None


def server_token(environment: Mapping[str, str], token: str) -> str:
    """The key of the rollout servers of the run with this token.  Raises ValueError for one that is too short."""
    return given_server_token(environment) or derived(token, "servers")


def derived(token: str, purpose: str) -> str:
    """Another secret, from which the token cannot be computed."""
    return hmac.new(token.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def without_tokens(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without tokens, for a process that does not need them."""
    return {k: v for k, v in environment.items() if k not in (VARIABLE, FILE_VARIABLE, SERVER_VARIABLE)}


def _require_length(secret: str, source: str) -> None:
    if len(secret) < _ENOUGH:
        raise ValueError(f"{source}: expected at least {_ENOUGH} characters, for example from `openssl rand -hex 32`")


def _read(file: Path) -> str:
    try:
        mode, token = file.stat().st_mode, file.read_text().strip()
    except OSError as error:
        raise ValueError(f"{FILE_VARIABLE}={file}: {error.strerror}; expected a file with the run's token") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"{FILE_VARIABLE}={file}: others can read it; expected `chmod 600 {file}`")
    return token
