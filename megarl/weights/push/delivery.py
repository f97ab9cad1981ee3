"""One round of buckets from world rank 0: the same buckets for `shared` (mapped) and `gathered` (broadcast) servers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.weights.mapping.blocks import HFConfig
from megarl.weights.mapping.families import tied
from megarl.weights.mapping.names import ShardCoordinate
from megarl.weights.mapping.server_map import EngineKind, server_table
from megarl.weights.push.buckets import Bucket, Sizes
from megarl.weights.push.channel import backend
from megarl.weights.push.gpu_handles import take
from megarl.weights.push.report import one_line
from megarl.weights.push.servers import Server, Spent
from megarl.weights.push.shared import forget, payload, shared_buffer
from megarl.weights.push.targets import Lead
from megarl.weights.verify.digests import Kind, RankDigests


class _Layout(NamedTuple):
    """Servers of the same layout hold the same parameters under the same names."""

    engine: EngineKind
    coordinates: tuple[ShardCoordinate, ...]
    hashes: Kind


class BucketRound:
    """Sends the waiting servers one bucket after another, and meanwhile computes the digests that they must report.

    `send` only starts a bucket; call `settle` before the next one is sent.  In between the next one can be filled.
    """

    def __init__(self, lead: Lead, hf_config: HFConfig, sizes: Sizes) -> None:
        """Join the groups of `gathered` servers, and begin an update on all servers of the round."""
        self._lead, self._targets, self._hf_config = lead, lead.targets, hf_config
        self._transports = {
            url: transport for url, transport in self._targets.waiting().items() if transport != "sharded"
        }
        self._sums: dict[_Layout, list[RankDigests]] = {}
        self._shared: list[Tensor] = []  # buffers
        self._orders: dict[str, Future[Spent]] = {}  # of the bucket that is under way
        self._sent_at = 0.0  # when it was started
        dtypes = {name: dtype for name, (_, dtype) in sizes.items()}
        for url in self._transports:
            layout = _layout(self._targets.left[url])
            if layout not in self._sums:
                table = server_table(layout.engine, hf_config)
                self._sums[layout] = [
                    RankDigests(table, coordinate, dtypes, layout.hashes) for coordinate in layout.coordinates
                ]
        with self._targets.clock("join"):
            self._targets.attempt(lambda server: server.join(backend()), self._of("gathered"))
        with self._targets.clock("pause"):
            self._targets.attempt(Server.open, self.urls)

    @property
    def urls(self) -> list[str]:
        """The servers that still take part: the others were dropped or wait for another round."""
        waiting = self._targets.waiting()
        return [url for url, transport in self._transports.items() if waiting.get(url) == transport]

    def new_buffer(self, num_bytes: int, device: torch.device) -> Tensor:
        """A buffer; on a CPU it is in shared memory if any server uses `shared`."""
        shared = [url for url in self.urls if self._transports[url] == "shared"]
        if shared and device.type == "cpu":
            try:
                self._shared.append(shared_buffer(num_bytes))
                return self._shared[-1]
            except OSError as error:
                for url in shared:
                    self._targets.fall_back(url, f"no shared memory of {num_bytes} bytes: {one_line(error)}")
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def send(self, bucket: Bucket, handles: Mapping[str, list[str]] | None) -> None:
        """`handles`: of the bucket on each GPU; None: the bucket is only in this process' memory."""
        assert not self._orders, "the bucket before is still under way"
        version, flush = (self._lead.version, self._lead.flush_cache) if bucket.is_last else (None, False)
        targets, self._sent_at = self._targets, time.perf_counter()
        self._orders = targets.start(lambda server: server.send(bucket, version, flush), self._of("gathered"))
        for url in self._of("shared"):
            server = targets.left[url]
            try:
                texts = (
                    [payload(bucket) for _ in server.nature.coordinates] if handles is None else take(handles, server)
                )
            except ValueError as error:
                targets.fall_back(url, one_line(error))
            else:
                order = partial(Server.map, texts=texts, version=version, flush_cache=flush)
                self._orders |= targets.start(order, [url])
        with targets.clock("verify"):
            self._add(bucket)

    def settle(self) -> None:
        """Wait until all servers have loaded the bucket that is under way, if there is one, and released its memory."""
        (orders, self._orders), targets = (self._orders, {}), self._targets
        began = time.perf_counter()
        with targets.clock("send"):
            spent = list(targets.finish(orders).values())
        waited = time.perf_counter() - began
        sending = max((self._sent_at + s.send - began for s in spent), default=0.0)  # of the wait, until bytes had left
        targets.clock.split("load", of="send", seconds=max(0.0, waited - max(0.0, sending)))

    def close(self) -> None:
        """No server opens a bucket any more."""
        for buffer in self._shared:
            forget(buffer)

    def _of(self, transport: str) -> list[str]:
        return [url for url in self.urls if self._transports[url] == transport]

    def _add(self, bucket: Bucket) -> None:
        for (name, raw), shape in zip(bucket.parts(), bucket.shapes, strict=True):
            tensor = raw.view(bucket.dtype).view(shape)
            for ranks in self._sums.values():
                for rank in ranks:
                    rank.add(name, tensor)

    def verify(self) -> None:
        """After the last bucket: servers with the expected checksums are done."""
        expected = {layout: [rank.result() for rank in ranks] for layout, ranks in self._sums.items()}
        targets, copies = self._targets, tied(self._hf_config)
        with targets.clock("verify"):
            plain = [url for url in self.urls if targets.left[url].nature.is_plain]
            checked = targets.attempt(lambda s: s.verify(expected[_layout(s)], copies), plain)
            self._lead.verified |= checked
            targets.done |= {url: self._transports[url] for url in checked}
            others = targets.attempt(Server.look, self.urls)
            faults = disagreements({url: targets.left[url] for url in others}, dict.fromkeys(others, repr(expected)))
            targets.done |= {url: self._transports[url] for url in others if url not in faults}
            self._lead.unverified |= {url for url in others if not targets.left[url].pushed}
            self._lead.compares |= bool(self._lead.unverified)
            for url in others:
                if url not in faults:
                    targets.left[url].remember(repr(expected))
            for url, reason in faults.items():
                targets.fall_back(url, reason)


def _layout(server: Server) -> _Layout:
    return _Layout(server.nature.engine, server.nature.coordinates, server.nature.hashes)


def disagreements(servers: Mapping[str, Server], weights: Mapping[str, str]) -> dict[str, str]:
    """url -> reason, for servers whose checksums are not computed here, such as those of quantized weights.

    Since the last good push their checksums must have changed if and only if the trainer's `weights` changed (for each
    url a text that identifies the weights).  They must be the same on all servers of one layout.
    """
    faults: dict[str, str] = {}
    same: dict[_Layout, list[str]] = defaultdict(list)
    for url, server in servers.items():
        same[_layout(server)].append(url)
        changed, held_changed = weights[url] != server.pushed, server.held != server.held_then
        if server.pushed and changed != held_changed:
            what = "the weights changed" if changed else "the weights are those of the last push"
            faults[url] = f"{url}: {what}, and its checksums {'did' if held_changed else 'did not'}"
    for urls in same.values():
        if any(servers[url].held != servers[urls[0]].held for url in urls):
            faults |= {url: f"{url} and its replicas answer with different checksums" for url in urls}
    return faults
