"""Tells an agent's error at a limit of its episode from a fault of its own behind the limit."""

from __future__ import annotations

import re

_STATUS = ("status", "status_code", "code")  # where clients keep it
# And what they say: the code and the sentences of OverLimit, and the ways in which clients write the status of a reply.
_TELLS = re.compile(
    r"context_length_exceeded|the episode has \d+ turns, and may have \d+: it is over"
    r"|the episode \d+ of its \d+ left: it is over"
    r"|\b(?:Error code: 400|HTTP Error 400: |returned error: 400|400, message=|400 Client Error: )"
    r"|Client error '400 "
)


def is_refusal(error: BaseException) -> bool:
    """Whether this is the error of a request that was refused, or was raised `from` one: no fault behind it.

    Clients have errors of their own, and what is in another process, or a program's last words, is text alone.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_refusal, error.exceptions))
    is_told = any(getattr(error, name, None) == 400 for name in _STATUS) or _TELLS.search(str(error)) is not None
    return is_told or (error.__cause__ is not None and is_refusal(error.__cause__))
