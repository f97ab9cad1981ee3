"""Putting the trainer's weights into the servers, and proving that they arrived.

World rank 0 sends; the other ranks of its replica only take part in gathering the tensors.  Each server is paused,
gets the tensors in buckets over a weight group of its own, and is asked for the digest of every tensor that it then
holds.  It writes again only when all digests are those of the trainer.  Failing servers cannot hold up the ranks: every
wait has a limit, and the gathering is finished whatever happened.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.rollout.protocol import tensor_digest
from megarl.weights.buckets import Bucket, Sizes, fill_buckets
from megarl.weights.export import BUFFER_BYTES, hf_sizes, hf_tensors
from megarl.weights.gather import Model
from megarl.weights.names import num_bytes
from megarl.weights.servers import PushError, Server
from megarl.weights.tables import HFConfig, twins

T = TypeVar("T")


@dataclass(frozen=True)
class PushReport:
    """Example: PushReport(7, 40, 2_400_000, 40, {"pause": 0.004, "gather": 0.003, "send": 0.006, ...})."""

    version: int
    num_tensors: int
    num_bytes: int  # of one copy of the model
    num_verified: int  # digests found equal, summed over servers
    timings: dict[str, float]  # seconds: join (first push), pause, gather, send, verify, resume


class Pusher:
    """Lives on every rank; groups are made at the first push, and again when `connect` names other servers.

    Peak extra memory on rank 0: one bucket, beside what `hf_tensors` needs.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        hf_config: HFConfig,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUFFER_BYTES,
        timeout_s: float = 120.0,
    ) -> None:
        """`dtype`: what the servers hold (None: what the trainer does); `timeout_s` limits every single wait."""
        self._token, self._hf_config, self._dtype = token, hf_config, dtype
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._servers: dict[str, Server] = {}
        self.connect(urls)

    def connect(self, urls: Sequence[str]) -> None:
        """Push to these servers from now on; those that were there before keep their groups."""
        for url in set(self._servers) - set(urls):
            self._servers.pop(url).leave()
        self._servers = {url: self._servers.get(url) or Server(url, self._token, self._timeout_s) for url in urls}
        self._threads = ThreadPoolExecutor(max(2, len(urls)), thread_name_prefix="push")

    def push(self, model: Model, version: int, *, pause_mode: str = "retract") -> PushReport | None:
        """Every rank calls it; world rank 0 gets the report, or PushError, the others None.

        `pause_mode`: abort | retract | in_place (running completions go on, with new weights and their old KV cache).
        After a PushError the servers stay paused, as nobody knows what they hold.
        """
        if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
            return None
        sizes = hf_sizes(model, self._hf_config, dtype=self._dtype)
        stream = hf_tensors(model, self._hf_config, dtype=self._dtype, buffer_bytes=self._bucket_bytes)
        try:
            return self._send_all(stream, sizes, version, pause_mode) if dist.get_rank() == 0 else None
        except RuntimeError as error:
            raise PushError(f"the push of weights version {version} failed: {_one_line(error)}") from error
        finally:
            deque(stream, maxlen=0)  # the other ranks wait for us in its collectives

    def close(self) -> None:
        self.connect([])

    def _send_all(
        self, stream: Iterator[tuple[str, Tensor]], sizes: Sizes, version: int, pause_mode: str
    ) -> PushReport:
        clock, digests = _Clock(), dict[str, str]()
        with clock("join"):
            for server in self._servers.values():
                self._results(server.join("nccl" if torch.cuda.is_available() else "gloo", self._threads))
        with clock("pause"):
            self._everywhere(lambda server: server.open(pause_mode))
        buckets = fill_buckets(stream, sizes, self._bucket_bytes)
        while True:
            with clock("gather"):
                bucket = next(buckets, None)
            if bucket is None:
                break
            with clock("send"):
                digests |= self._send(bucket, version, flush_cache=pause_mode != "in_place")
        with clock("send"):
            self._everywhere(Server.close_update)
        with clock("verify"):
            tied = twins(self._hf_config)
            num_verified = sum(self._everywhere(lambda server: server.verify(digests, tied)))
        with clock("resume"):
            self._everywhere(Server.resume)
        total = sum(num_bytes(shape, dtype) for shape, dtype in sizes.values())
        return PushReport(version, len(sizes), total, num_verified, dict(clock.seconds))

    def _send(self, bucket: Bucket, version: int, flush_cache: bool) -> dict[str, str]:
        """One bucket to all servers at once; the digests of its tensors, computed meanwhile."""
        stamp = version if bucket.is_last else None
        flush = flush_cache and bucket.is_last
        answers = [self._threads.submit(s.receive, bucket, stamp, flush) for s in self._servers.values()]
        sends = [server.broadcast(bucket) for server in self._servers.values()]
        digests = {name: tensor_digest(raw) for name, raw in bucket.parts()}
        self._results(answers)  # a refusal answers at once, while the broadcast would wait for ever
        for send in sends:
            send.wait(timedelta(seconds=self._timeout_s))
        return digests

    def _everywhere(self, order: Callable[[Server], T]) -> list[T]:
        """Give all servers the same order at the same time."""
        return self._results([self._threads.submit(order, server) for server in self._servers.values()])

    def _results(self, futures: list[Future[T]]) -> list[T]:
        """All results, or the first failure without waiting for the rest."""
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            if (error := future.exception()) is not None:
                raise error
        return [future.result() for future in futures]


class _Clock:
    """Sums the seconds of each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start


def _one_line(error: Any) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
