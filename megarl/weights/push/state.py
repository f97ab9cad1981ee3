"""The servers of one push: by which transport each gets the weights, whether it was verified, or why it was dropped.

A server that fails is dropped at once, and the others go on.  Every request has a timeout, so a step lasts as long as
the slowest remaining server, or until the timeout if a server does not answer; the next step is without that server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import TypeVar

from megarl.rollout.client import ServerError
from megarl.weights.clock import Clock
from megarl.weights.mapping.names import Sizes, num_bytes
from megarl.weights.push.channel import is_here
from megarl.weights.push.report import PushError, PushReport, one_line
from megarl.weights.push.servers import Server

T = TypeVar("T")
logger = logging.getLogger("megarl.push")

SLICES = ("shared", "sharded")  # these bring slices, the others whole tensors
# The last is the slowest and works unless the server uses our GPUs.  `mapped` is what `shared` falls back to.
TRANSPORTS = ("sharded", "shared", "mapped", "gathered")
FAILURES = (ServerError, PushError, RuntimeError, OSError, ValueError)  # of one server or the connection to it


@dataclass
class Target:
    """One server in one push."""

    server: Server
    transports: list[str] = field(default_factory=list)  # still to be tried, fastest first; the first one is in use
    done: str = ""  # the transport that brought the weights; empty: they are not there, or not verified
    failure: str | None = None  # why it was dropped
    is_silent: bool = False  # it was dropped and does not answer any more
    fallbacks: list[str] = field(default_factory=list)  # "transport: reason", in the order of the attempts
    num_equal: int | None = None  # digests found equal to those that were computed here; None: none were
    # If a server gets whole tensors after slices: a text that identifies the slices, and its checksums after them.
    after_slices: tuple[str, list[dict[str, str]]] | None = None
    slices_by: str = ""  # the transport that brought these
    needs_folder: bool = False  # its digests cannot be computed, and there is no earlier good push to compare with
    is_compared: bool = False  # its checksums were the same after it loaded whole tensors itself


class PushState:
    """Rank 0's state of one push.

    Example: state.each(Server.probe); state.choose("auto", on_gpu=False, is_cut=True); state.drop(url, "x")
    """

    def __init__(
        self, servers: Mapping[str, Server], threads: Executor, version: int, *, flush_cache: bool, checks: bool
    ) -> None:
        """`checks`: compare slices with whole tensors, and checksums that are not computed here with a folder."""
        self._threads = threads
        self.version = version
        self.flush_cache = flush_cache
        self.checks = checks
        self.targets = {url: Target(server) for url, server in servers.items()}
        self.clock = Clock()

    @property
    def left(self) -> dict[str, Server]:
        """The servers that have not failed."""
        return {url: target.server for url, target in self.targets.items() if target.failure is None}

    @property
    def failed(self) -> dict[str, str]:
        return {url: target.failure for url, target in self.targets.items() if target.failure is not None}

    @property
    def done(self) -> dict[str, str]:
        """url -> transport of the servers that got the weights and were verified."""
        return {url: target.done for url, target in self.targets.items() if target.done}

    @property
    def fallbacks(self) -> dict[str, list[str]]:
        return {url: target.fallbacks for url, target in self.targets.items() if target.fallbacks}

    @property
    def needs_folder(self) -> bool:
        """Whether servers whose digests cannot be computed are to be compared with an exported folder."""
        return self.checks or any(target.needs_folder for target in self.targets.values())

    def waiting(self) -> dict[str, str]:
        """url -> transport of the servers that are still to get the weights."""
        return {url: self.targets[url].transports[0] for url in self.left if not self.targets[url].done}

    # ---- transports

    def choose(self, wanted: str, *, on_gpu: bool, is_cut: bool, gpus: Collection[str] = ()) -> None:
        """Choose the possible transports of each server, fastest first; `wanted`: auto, or one of TRANSPORTS.

        A server without a possible transport is dropped.  On the trainer's GPUs (`gpus`) only memory that both map is
        possible: NCCL cannot join two processes on one GPU.

        Without GPUs slices are digested twice by the same core, so a whole model is fastest in mapped buckets.  If it
        `is_cut` over ranks, these have to be gathered first.  Measured (two cores): from two ranks that both have the
        model (134 MB) 0.32 s by mapped, 0.40 s by sharded and 0.43 s by shared; from eight ranks that have an eighth
        each (537 MB) into a server of four 9.6 s, 1.8 s and 2.0 s.
        """
        order: Sequence[str] = TRANSPORTS
        if wanted == "auto" and not (is_cut or on_gpu):
            order = sorted(TRANSPORTS, key="mapped".__ne__)
        ways = {"auto": TRANSPORTS, "shared": ("shared", "mapped")}.get(wanted, (wanted,))
        for url, target in self.targets.items():
            if target.failure is not None:
                continue
            obstacles = {transport: _obstacle(target.server, transport, wanted, on_gpu, gpus) for transport in order}
            possible = [transport for transport in order if obstacles[transport] is None]
            target.transports = [each for each in possible if each in ways or each == possible[-1]]
            if not possible:
                mapped, sent = obstacles["mapped"], obstacles["gathered"]
                self.drop(url, f"no transport reaches {url}: shared needs {mapped}, the others {sent}")
            elif not set(ways).intersection(possible):
                self.warn(url, wanted, f"it needs {obstacles[wanted]}")

    def send_on(self, url: str) -> str:
        """Push to this server again, by its next transport; returns the transport that was used until now."""
        self.targets[url].done = ""
        return self.targets[url].transports.pop(0)

    def fall_back(self, url: str, reason: str) -> None:
        """After a failed transport: use a slower one if there is any and the server still answers, else drop it."""
        target = self.targets[url]
        is_there = target.server.is_there()
        if len(target.transports) == 1 or not is_there:
            self.drop(url, reason)
            target.is_silent = not is_there
            return
        self.warn(url, self.send_on(url), reason)

    def warn(self, url: str, transport: str, reason: str) -> None:
        logger.warning("%s: the transport %s failed: %s", url, transport, reason)
        self.targets[url].fallbacks.append(f"{transport}: {reason}")

    def drop(self, url: str, reason: str) -> None:
        """Exclude this server from the rest of the push."""
        logger.warning("%s is left out: %s", url, reason)
        self.targets[url].failure, self.targets[url].done = reason, ""

    # ---- requests to several servers

    def each(self, order: Callable[[Server], T], urls: Iterable[str] | None = None) -> dict[str, T]:
        """Call `order` for these servers (None: all that are left) in parallel; servers that fail are dropped."""
        return self._results(self.start(order, self.left if urls is None else urls), self.drop)

    def attempt(self, order: Callable[[Server], T], urls: Iterable[str]) -> dict[str, T]:
        """Like `each`, but a server that fails falls back to a slower transport, if there is one."""
        return self.finish(self.start(order, urls))

    def start(self, order: Callable[[Server], T], urls: Iterable[str]) -> dict[str, Future[T]]:
        return {url: self._threads.submit(order, self.targets[url].server) for url in urls}

    def finish(self, started: Mapping[str, Future[T]]) -> dict[str, T]:
        """Wait for calls begun by `start`; returns what `attempt` returns."""
        return self._results(started, self.fall_back)

    def _results(self, started: Mapping[str, Future[T]], on_failure: Callable[[str, str], None]) -> dict[str, T]:
        results: dict[str, T] = {}
        for url, future in started.items():
            try:
                results[url] = future.result()
            except FAILURES as error:
                on_failure(url, one_line(error))
        return results

    # ---- the end

    def report(self, sizes: Sizes) -> PushReport:
        """PushError if no server holds the weights."""
        done = {url: target for url, target in self.targets.items() if target.done}
        report = PushReport(
            version=self.version,
            num_tensors=len(sizes),
            num_bytes=sum(num_bytes(shape, dtype) for shape, dtype in sizes.values()),
            num_verified=sum(target.num_equal or 0 for target in done.values()),
            transports=self.done,
            failed=self.failed,
            fallbacks=self.fallbacks,
            compared=sorted(url for url, target in done.items() if target.is_compared),
            timings=dict(self.clock.seconds),
            unverified=[url for url, target in done.items() if target.num_equal is None and not target.is_compared],
        )
        if report.transports:
            return report
        error = PushError(f"the push of weights version {self.version} failed: {'; '.join(report.failed.values())}")
        error.report = report
        raise error


def _obstacle(server: Server, transport: str, wanted: str, on_gpu: bool, gpus: Collection[str]) -> str | None:
    """What this server lacks for a transport; None if the transport is possible."""
    able, is_mapped = server.capabilities, transport in ("shared", "mapped")
    if transport in SLICES and (lacking := _lacking_for_slices(server)):
        return lacking
    if on_gpu and able.first_gpu is not None and server.gpus:
        common = set(server.gpus) & set(gpus)
        if is_mapped:
            return None if common == set(server.gpus) else "a rank of the trainer on each of its GPUs"
        if common:
            return "a server on GPUs of its own"
    if is_mapped:
        if not is_here(server.url):
            return "a server on this machine"
        if (able.first_gpu is not None) != on_gpu:
            return "a trainer and a server that both use GPUs, or both none"
        # The server does not report whether it uses the trainer's GPUs, so the configuration must say so.
        return "rollout.push=shared, on GPUs" if on_gpu and wanted == "auto" else None
    return None


def _lacking_for_slices(server: Server) -> str:
    able = server.capabilities
    if able.is_stacked:
        return "a model that does not stack its experts in one tensor"
    if able.drafts:  # SGLang gives both models what it receives, and each has one model's parameters
        return "a server without a draft model"
    if not able.has_receiver:
        return "a server that was started with our custom weight loader"
    if not able.is_plain:
        return "a server without quantization that cuts its layers over its ranks as our tables say"
    return "a server that has slices where it puts whole tensors" if server.fits_slices is False else ""
