"""Failures of ranks as sentences: which rank, on which machine, host and process, and where its log is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.io.durable_files import StorageError
from megarl.processes.channels.store import Unreachable
from megarl.processes.ranks import Share

GONE = "Gone"
# Exceptions of torch.distributed: as a rule they follow the failure of another rank.  Those of gloo have no class.
_FOLLOWING = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
_MORE_MEMORY = "`megarl plan` counts what a run takes: fewer ranks or servers, smaller batches or more memory help"
_NAMED = 4  # ranks that an error names


class RankError(RuntimeError):
    """An exception on a rank, or the death of a rank; `report` holds the remote traceback."""

    def __init__(self, message: str, report: str = "") -> None:
        super().__init__(message)
        self.report = report


class OutOfMemory(RankError):
    """The kernel killed a rank because memory ran out."""


class PortsBlocked(RankError):
    """A rank cannot connect to another machine."""


def may_follow(errors: Iterable[dict[str, Any]]) -> bool:
    """Whether all of these reports of ranks may be consequences of what happened to another rank."""
    return all(error["type"] in _FOLLOWING for error in errors)


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    machine: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"machine {self.machine}, host {self.host}, pid {self.pid}"


class Places:
    """Where the ranks of a group run and write their logs, and the errors about them."""

    def __init__(self, name: str, shares: Sequence[Share], log_dir: Path, memory: Callable[[Share], str]) -> None:
        """`memory`: the words of MemoryEnd about a share of which a rank has ended."""
        self._group = f"group {name}"
        self._shares = shares
        self._log_dir = log_dir
        self._memory = memory
        self._places: dict[int, Place] = {}  # of the ranks that have connected

    def note(self, rank: int, hello: dict[str, Any]) -> None:
        """`hello`: what the rank said of itself when it connected."""
        self._places[rank] = Place(self._share_of(rank).node, str(hello["host"]), int(hello["pid"]))

    def logs_of(self, share: Share) -> Path:
        return self._log_dir / f"node_{share.node}" if len(self._shares) > 1 else self._log_dir

    def _share_of(self, rank: int) -> Share:
        return next(s for s in self._shares if s.first_rank <= rank < s.first_rank + s.num_ranks)

    def _log_of(self, rank: int) -> Path:
        return self.logs_of(self._share_of(rank)) / f"rank_{rank}.log"

    def _named(self, ranks: Sequence[int]) -> str:
        """Example: "rank 5 (machine 1, host gpu-07, pid 123)"."""
        named = [f"rank {rank} ({self._places[rank]})" if rank in self._places else f"rank {rank}" for rank in ranks]
        more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
        return ", ".join(named[:_NAMED]) + more

    def died(self, rank: int, method: str, lost: str = "") -> RankError:
        """`lost`: the reason, if not only the rank but its machine is gone."""
        if not lost:
            died = f"{self._group}: {self._named([rank])} died in {method}"
            return self.gone(died, self._share_of(rank), self._log_of(rank))
        share, place = self._share_of(rank), self._places.get(rank)
        host = f" (host {place.host})" if place is not None else ""
        ranks = f"ranks {share.first_rank} to {share.first_rank + share.num_ranks - 1}"
        return RankError(f"{self._group}: machine {share.node}{host} is lost in {method} with {ranks}: {lost}")

    def gone(self, how: str, share: Share, log: Path) -> RankError:
        """`how`: the begin of the sentence; `share`: of which a rank has ended."""
        if memory := self._memory(share):
            return OutOfMemory(f"{how}, {memory}; {_MORE_MEMORY}; see {log}")
        return RankError(f"{how}; see {log}")

    def hangs(self, ranks: Sequence[int], how: str, errors: Mapping[int, dict[str, Any]] | None = None) -> RankError:
        """The error for ranks that still run; they are killed when the group is closed, and show what they did.

        `errors`: what other ranks reported.
        """
        stacks = f"{'its stack is' if len(ranks) == 1 else 'their stacks are'} then in {self._log_of(ranks[0])}"
        others = " and beside it" if len(ranks) > 1 else ""
        return RankError(f"{self._group}: {self._named(ranks)} {how}; {stacks}{others}", self.report(errors or {}))

    def report(self, errors: Mapping[int, dict[str, Any]]) -> str:
        """The tracebacks of ranks."""
        return "\n".join(f"{self._named([r])}:\n{e['traceback']}" for r, e in sorted(errors.items()))

    def failed(self, method: str, errors: Mapping[int, dict[str, Any]]) -> Exception:
        """The most informative error: an exception that follows from no other, else the end of a rank, else any.

        A StorageError if no rank has another one: they can go on.
        `errors`: rank -> what it reported; of type GONE if it has ended without a report.
        """
        worth = {GONE: 1} | dict.fromkeys(_FOLLOWING, 2)
        rank, first = min(errors.items(), key=lambda item: (worth.get(item[1]["type"], 0), item[1]["type"], item[0]))
        report = self.report(errors)
        if first["type"] == "ValueError":
            mistake = ValueError(first["message"])
            mistake.__cause__ = RankError(report)  # for the traceback
            return mistake
        if first["type"] == GONE:
            gone = self.died(rank, method, first["lost"])
            gone.report = report
            return gone
        what = f"{self._group}: {self._named([rank])} failed in {method}: {first['type']}: {first['message']}"
        if all(error.get("storage") for error in errors.values()):
            return StorageError(first["storage"], what)
        return (PortsBlocked if first["type"] == Unreachable.__name__ else RankError)(what, report)
