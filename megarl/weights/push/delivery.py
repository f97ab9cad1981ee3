"""Sends buckets from world rank 0: the same buckets to `mapped` and `gathered` (broadcast) servers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from megarl.weights.push.buckets import Bucket
from megarl.weights.push.channel import backend
from megarl.weights.push.gpu_handles import take
from megarl.weights.push.report import one_line
from megarl.weights.push.servers import Server
from megarl.weights.push.shared import forget, payload, shared_buffer
from megarl.weights.push.state import SLICES, PushState


class BucketDelivery:
    """Sends one bucket after another to the servers that wait for whole tensors.

    `send` only starts a bucket; call `wait` before the next one is sent.  In between the next one can be filled.
    """

    def __init__(self, state: PushState) -> None:
        """Join the groups of `gathered` servers, and begin an update on all servers."""
        self._state = state
        self.transports = {url: each for url, each in state.waiting().items() if each not in SLICES}
        self._shared_buffers: list[Tensor] = []
        self._under_way: dict[str, Future[float]] = {}
        self._sent_at = 0.0  # when these were started
        with state.clock("join"):
            state.attempt(lambda server: server.join(backend()), self._urls("gathered"))
        with state.clock("pause"):
            state.attempt(Server.open, self._urls("gathered", "mapped"))

    def _urls(self, *transports: str) -> list[str]:
        """The servers that still take part: the others were dropped or wait for other transports."""
        waiting = self._state.waiting()
        return [url for url, each in self.transports.items() if each in transports and waiting.get(url) == each]

    def new_buffer(self, num_bytes: int, device: torch.device) -> Tensor:
        """A buffer; on a CPU it is in shared memory if any server maps it."""
        shared = self._urls("mapped")
        if shared and device.type == "cpu":
            try:
                self._shared_buffers.append(shared_buffer(num_bytes))
                return self._shared_buffers[-1]
            except OSError as error:
                for url in shared:
                    self._state.fall_back(url, f"no shared memory of {num_bytes} bytes: {one_line(error)}")
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def send(self, bucket: Bucket, handles: Mapping[str, list[str]] | None) -> None:
        """`handles`: of the bucket on each GPU; None: the bucket is only in this process' memory."""
        assert not self._under_way, "the bucket before is still under way"
        state, self._sent_at = self._state, time.perf_counter()
        version, flush = (state.version, state.flush_cache) if bucket.is_last else (None, False)
        self._under_way = state.start(lambda server: server.send(bucket, version, flush), self._urls("gathered"))
        for url in self._urls("mapped"):
            server = state.targets[url].server
            try:
                texts = (
                    [payload(bucket) for _ in range(server.capabilities.layout.tp)]
                    if handles is None
                    else take(handles, server)
                )
            except ValueError as error:
                state.fall_back(url, one_line(error))
            else:
                order = partial(Server.map, texts=texts, version=version, flush_cache=flush)
                self._under_way |= state.start(order, [url])

    def wait(self) -> None:
        """Wait until all servers have loaded the bucket that is under way, if there is one, and released its memory."""
        (under_way, self._under_way), clock = (self._under_way, {}), self._state.clock
        began = time.perf_counter()
        with clock("send"):
            sending_s = list(self._state.finish(under_way).values())
        waited = time.perf_counter() - began
        sending = max((self._sent_at + s - began for s in sending_s), default=0.0)  # of the wait, until bytes had left
        clock.split("load", of="send", seconds=max(0.0, waited - max(0.0, sending)))

    def close(self) -> None:
        """Forget the shared buffers, after which no server can open a bucket."""
        for buffer in self._shared_buffers:
            forget(buffer)
