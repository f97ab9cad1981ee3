"""The report of a push: which servers hold the weights, which failed and why, and the seconds of each phase."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PushReport:
    """Example: PushReport(7, 40, 2_400_000, 80, {"http://a": "shared", "http://b": "gathered"}, {}, {}, [], {...})."""

    version: int
    num_tensors: int  # of the model, under their HF names
    num_bytes: int  # of one copy of the model
    num_verified: int  # digests found equal, summed over servers
    transports: dict[str, str]  # url -> transport: the servers that hold this version, verified, and generate again
    failed: dict[str, str]  # url -> reason: servers that must not be used; paused if they could be reached
    fallbacks: dict[
        str, list[str]
    ]  # url -> "transport: reason" of each faster transport that failed before a slower one was used
    # urls whose checksums were the same after the server itself loaded whole tensors: from an exported folder or, the
    # first time that a server process was sent slices and at each later check, from buckets sent after the slices
    compared: list[str]
    # seconds of rank 0, or of the slowest sender, by phase: join, pause, gather, convert, send, load, verify, resume
    timings: dict[str, float]
    # urls of `transports` whose checksums cannot be computed and were not compared with a folder in this push; it was
    # only checked that they changed exactly when the weights changed
    unverified: list[str] = field(default_factory=list)
    adapter: str | None = None  # the name that completions have to use, if an adapter was pushed


class PushError(RuntimeError):
    """Servers do not hold the trainer's weights; the message names them, and the tensors if they are known.

    Raised by a push if no server took the weights; then `report` has the details.
    """

    report: PushReport | None = None


def one_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
