"""The servers of one push: which are left, which transport each uses, and why the others were dropped.

A server that fails is dropped at once, and the others go on.  Every request has a timeout, so a step lasts as long as
the slowest remaining server, or until the timeout if a server does not answer; the next step is without that server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Executor, Future
from typing import TypeVar

from megarl.rollout.client import ServerError
from megarl.weights.mapping.names import num_bytes
from megarl.weights.push.buckets import Sizes
from megarl.weights.push.channel import is_here
from megarl.weights.push.report import Clock, PushError, PushReport, one_line
from megarl.weights.push.servers import Server

T = TypeVar("T")
logger = logging.getLogger("megarl.push")

TRANSPORTS = ("shared", "sharded", "gathered")  # the last is the slowest and works unless the server uses our GPUs
FAILURES = (ServerError, PushError, RuntimeError, OSError, ValueError)  # of one server or the connection to it


class Targets:
    """Example: targets.each(Server.probe); targets.choose("auto", on_gpu=False, is_cut=True); targets.drop(url, "x")"""

    def __init__(self, servers: Mapping[str, Server], threads: Executor) -> None:
        self.left = dict(servers)  # those that have not failed
        self.failed: dict[str, str] = {}  # url -> reason
        self.silent: set[str] = set()  # the failed servers that do not answer any more
        self.done: dict[str, str] = {}  # url -> transport: servers that got the weights and were verified
        self.fallbacks: dict[str, list[str]] = {}  # url -> "transport: reason", in the order of the attempts
        self.clock = Clock()
        self._threads = threads
        self._transports: dict[str, list[str]] = {}  # url -> transports still to be tried

    def choose(self, wanted: str, *, on_gpu: bool, is_cut: bool, gpus: Collection[str] = ()) -> None:
        """Choose the possible transports of each server, fastest first; `wanted`: auto, or one of TRANSPORTS.

        A server without a possible transport is dropped.  On the trainer's GPUs (`gpus`) only `shared` is possible:
        NCCL cannot join two processes on one GPU.

        Mapping a bucket is faster than sending it.  But if the model `is_cut` over ranks, its buckets have to be
        gathered first, and sending slices is faster.  Measured (100 MB, two cores): a whole model takes 0.17 s by
        shared and 0.26 s by sharded; a model of which each of two ranks has half takes 0.55 s and 0.25 s.
        """
        order = ("sharded", "shared", "gathered") if is_cut else TRANSPORTS
        for url, server in list(self.left.items()):
            obstacles = {transport: _obstacle(server, transport, wanted, on_gpu, gpus) for transport in order}
            self._transports[url] = possible = [transport for transport in order if obstacles[transport] is None]
            if not possible:
                mapped, sent = obstacles["shared"], obstacles["gathered"]
                self.drop(url, f"no transport reaches {url}: shared needs {mapped}, the others {sent}")
            elif wanted != "auto":
                self._transports[url] = [transport for transport in possible if transport in (wanted, possible[-1])]
                if wanted not in possible:
                    self.warn(url, wanted, f"it needs {obstacles[wanted]}")

    def send_on(self, url: str) -> str:
        """Push to this server again, by its next transport; returns the transport that was used until now."""
        self.done.pop(url, None)
        transport, *self._transports[url] = self._transports[url]
        return transport

    def waiting(self) -> dict[str, str]:
        """url -> transport of the servers that are still to get the weights."""
        return {
            url: transports[0]
            for url, transports in self._transports.items()
            if url in self.left and url not in self.done
        }

    def each(self, order: Callable[[Server], T], urls: Iterable[str] | None = None) -> dict[str, T]:
        """Call `order` for these servers (None: all that are left) in parallel; servers that fail are dropped."""
        return self._settle(self.start(order, list(self.left if urls is None else urls)), self.drop)

    def attempt(self, order: Callable[[Server], T], urls: Iterable[str]) -> dict[str, T]:
        """Like `each`, but a server that fails falls back to a slower transport, if there is one."""
        return self.finish(self.start(order, urls))

    def start(self, order: Callable[[Server], T], urls: Iterable[str]) -> dict[str, Future[T]]:
        return {url: self._threads.submit(order, self.left[url]) for url in urls}

    def finish(self, started: Mapping[str, Future[T]]) -> dict[str, T]:
        """Wait for calls begun by `start`; returns what `attempt` returns."""
        return self._settle(started, self.fall_back)

    def _settle(self, started: Mapping[str, Future[T]], on_failure: Callable[[str, str], None]) -> dict[str, T]:
        results: dict[str, T] = {}
        for url, future in started.items():
            try:
                results[url] = future.result()
            except FAILURES as error:
                on_failure(url, one_line(error))
        return results

    def drop(self, url: str, reason: str) -> None:
        """Exclude this server from the rest of the push."""
        logger.warning("%s is left out: %s", url, reason)
        self.failed[url] = reason
        self.done.pop(url, None)
        del self.left[url]

    def fall_back(self, url: str, reason: str) -> None:
        """After a failed transport: use a slower one if there is any and the server still answers, else drop it."""
        is_there = self.left[url].is_there()
        if len(self._transports[url]) == 1 or not is_there:
            self.drop(url, reason)
            self.silent |= set() if is_there else {url}
            return
        self.warn(url, self.send_on(url), reason)

    def warn(self, url: str, transport: str, reason: str) -> None:
        logger.warning("%s: the transport %s failed: %s", url, transport, reason)
        self.fallbacks.setdefault(url, []).append(f"{transport}: {reason}")


class Lead:
    """Rank 0's state of one push."""

    def __init__(self, targets: Targets, version: int, *, flush_cache: bool, checks: bool) -> None:
        """`checks`: compare slices with whole tensors, and checksums that are not computed here with a folder."""
        self.targets, self.version, self.flush_cache = targets, version, flush_cache
        self.checks = checks
        self.compares = checks  # whether an exported folder is still to be read
        self.sent: dict[str, str] = {}  # url -> digests of the slices sent to it, until its checksums are read
        # url -> (those digests, its checksums): servers that get whole tensors too, to compare where these are placed
        self.slices: dict[str, tuple[str, list[dict[str, str]]]] = {}
        self.verified: dict[str, int] = {}  # url -> digests found equal
        self.unverified: set[str] = set()  # checksums cannot be computed, and no earlier good push to compare with
        self.compared: set[str] = set()

    def drop_unverified(self, reason: str) -> None:
        """Drop servers whose weights neither digests nor an exported folder have verified."""
        for url in sorted(self.unverified & set(self.targets.left) - self.compared):
            self.targets.drop(url, f"{url} has checksums that only an exported folder could verify: {reason}")

    def report(self, sizes: Sizes) -> PushReport:
        """PushError if no server holds the weights."""
        targets = self.targets
        report = PushReport(
            version=self.version,
            num_tensors=len(sizes),
            num_bytes=sum(num_bytes(shape, dtype) for shape, dtype in sizes.values()),
            num_verified=sum(self.verified.get(url, 0) for url in targets.done),
            transports=dict(targets.done),
            failed=dict(targets.failed),
            fallbacks=targets.fallbacks,
            compared=sorted(self.compared & set(targets.done)),
            timings=dict(targets.clock.seconds),
            unverified=[url for url in targets.done if url not in self.verified and url not in self.compared],
        )
        if report.transports:
            return report
        error = PushError(f"the push of weights version {self.version} failed: {'; '.join(report.failed.values())}")
        error.report = report
        raise error


def _obstacle(server: Server, transport: str, wanted: str, on_gpu: bool, gpus: Collection[str]) -> str | None:
    """What this server lacks for a transport; None if the transport is possible."""
    nature = server.nature
    if on_gpu and nature.first_gpu is not None and server.gpus:
        common = set(server.gpus) & set(gpus)
        if transport == "shared":
            return None if common == set(server.gpus) else "a rank of the trainer on each of its GPUs"
        if common:
            return "a server on GPUs of its own"
    if transport == "sharded":
        if nature.is_stacked:
            return "a model that does not stack its experts in one tensor"
        if not nature.has_receiver:
            return "a server that was started with our custom weight loader"
        if not nature.is_plain:
            return "a server without quantization that cuts its layers over its ranks as our tables say"
        return "a server that has slices where it puts whole tensors" if server.fits_slices is False else None
    if transport == "shared":
        if not is_here(server.url):
            return "a server on this machine"
        if (nature.first_gpu is not None) != on_gpu:
            return "a trainer and a server that both use GPUs, or both none"
        # The server does not report whether it uses the trainer's GPUs, so the configuration must say so.
        return "rollout.push=shared, on GPUs" if on_gpu and wanted == "auto" else None
    return None
