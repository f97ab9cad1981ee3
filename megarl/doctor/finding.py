"""A row of what `megarl doctor` says of a machine."""

from __future__ import annotations

from typing import NamedTuple

OK, NOTE, FAIL = "ok", "note", "fail"


class Finding(NamedTuple):
    """Example: Finding("einops", "missing", "0.8.2", FAIL, mend="python -m pip install einops==0.8.2")."""

    subject: str
    found: str
    wanted: str
    verdict: str  # fail: a run cannot start
    mend: str = ""  # the command that brings what is missing
    value: float | None = None  # what was measured, in bytes, bytes per second, or as a count
