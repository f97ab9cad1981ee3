"""Pushes the trainer's weights to the servers, and verifies that they arrived.

There are four transports.  `gathered`: rank 0 gathers every tensor and broadcasts it in buckets over a weight group
with each server.  `mapped`: a server on the same machine maps the buckets.  `sharded`: every rank sends its slices
straight to the server ranks that need them.  `shared`: every rank sends its slices to the ranks beside the server ranks
that need them, which map what comes there.  If a transport fails, the push falls back to a slower one.  Each server is
paused, gets the weights and reports the digests of what it then holds.  It resumes generation only if they equal the
digests that the trainer computed.  The first time that a server process gets slices, it must also hold the same after
whole tensors.  A server that fails stays paused and is named in the report; the others wait for it no longer than its
timeout.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from megarl.mcore.models.model import Model
from megarl.mcore.setup import in_first_copy, ranks_of_copy
from megarl.rollout.protocol import DTYPES
from megarl.servers.weight_group import groups_key
from megarl.weights.clock import Clock
from megarl.weights.hf.export import hf_sizes, hf_tensors, save_hf
from megarl.weights.hf.gather import to_its_end
from megarl.weights.mapping.blocks import HFConfig
from megarl.weights.mapping.names import Sizes, num_bytes
from megarl.weights.push.agreement import broadcast_json, gather_json
from megarl.weights.push.buckets import Bucket, NewBuffer, bucket_bytes_for, fill_buckets
from megarl.weights.push.channel import is_here
from megarl.weights.push.checks import (
    ExpectedDigests,
    check_slices,
    check_whole_tensors,
    compare_slices_with_whole,
    compare_with_folder,
    drop_unverified,
)
from megarl.weights.push.delivery import BucketDelivery
from megarl.weights.push.gpu_handles import Gpus, exchange, own_seat, wanted_handles
from megarl.weights.push.report import PushError, PushReport, one_line
from megarl.weights.push.routes import message_bytes_of
from megarl.weights.push.servers import CLEANING_S, Server
from megarl.weights.push.settings import PushSettings
from megarl.weights.push.sharded import ShardedSender
from megarl.weights.push.state import SLICES, TRANSPORTS, PushState
from megarl.weights.verify.canary import Canary, disagreement

__all__ = ["Canary", "PushError", "PushReport", "Pusher"]

logger = logging.getLogger("megarl.push")

_MAX_THREADS = 512  # one for each concurrent request to a server
_GATHERED_BYTES = 256 << 20  # the most that is gathered at a time; a bucket takes several such parts


class Pusher:
    """Exists on every rank; groups are made when they are first needed, and again for a server that was restarted.

    Peak extra memory: `bucket_bytes`, or twice the largest tensor, on each rank that sends whole tensors (also after
    the first slices), and what `hf_tensors` needs to gather them; or what `ShardedSender` says.
    """

    def __init__(self, settings: PushSettings, hf_config: HFConfig, *, source_folder: str | Path | None = None) -> None:
        """`source_folder`: whose files an exported folder has besides the weights; None: none is exported."""
        if settings.transport not in ("auto", *TRANSPORTS):
            raise ValueError(f"transport={settings.transport!r}: expected auto, {', '.join(TRANSPORTS)}")
        self._settings = settings
        self._hf_config = hf_config
        self._source_folder = source_folder
        self._dtype, self._bucket_bytes = DTYPES[settings.dtype] if settings.dtype else None, settings.bucket_bytes
        self._gpus = Gpus(**settings.gpus) if settings.gpus else Gpus()
        self._num_pushes = 0
        self._sizes: Sizes = {}
        self._servers: dict[str, Server] = {}
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "push", _use_device, (device,))
        self._sender: ShardedSender | None = None
        self._cleaning: list[Future[None]] = []

    def push(
        self,
        model: Model,
        version: int,
        *,
        only: Sequence[str] | None = None,
        canary: Canary | None = None,
    ) -> PushReport | None:
        """Every rank calls it; world rank 0 gets the report, or PushError if no server took the weights.

        `only`: push to these servers only; the state of the others is kept.
        """
        self._set_up(model)
        if dist.get_rank() != 0:
            self._follow(model)
            return None
        try:
            state = self._begin(self._settings.urls if only is None else only, version)
            self._deliver(model, state)
        finally:
            broadcast_json(None)  # ends `_follow`, after an error too
        return self._finish(state, canary)

    def close(self) -> None:
        """Leave all groups."""
        for server in self._servers.values():
            self._cleaning.append(self._threads.submit(server.leave))
        if self._sender is not None:
            self._sender.close()
        wait(self._cleaning)
        self._servers = {}

    def _set_up(self, model: Model) -> None:
        """Before the first push: the sizes of all tensors and of buckets.  A collective."""
        if self._sender is None:
            self._sizes = hf_sizes(model, self._hf_config, dtype=self._dtype)
            self._bucket_bytes = self._bucket_bytes or bucket_bytes_for(self._sizes)
            message_bytes = message_bytes_of(self._bucket_bytes)
            key, timeout_s = groups_key(self._settings.token), self._settings.timeout_s
            seats = gather_json(own_seat(self._gpus.trainer))
            self._sender = ShardedSender(self._hf_config, message_bytes, timeout_s, self._threads, key, seats)

    # ---- what the other ranks do

    def _follow(self, model: Model) -> None:
        """Take part in each collective that rank 0 names: slices, buckets, or an exported folder."""
        while (step := broadcast_json(None)) is not None:
            if "slices" in step:
                assert self._sender is not None, "a push makes the sender first"
                self._sender.send(model, step["slices"], self._sizes, None)
            elif "folder" in step:
                self._save(model, step["folder"])
            elif step["handles"] or in_first_copy():
                with self._whole_tensors(model, Clock()) as stream:
                    for bucket in self._buckets(stream, Clock()) if step["handles"] else ():
                        exchange(bucket, step["handles"], self._gpus.trainer)

    # ---- what rank 0 does

    def _begin(self, urls: Sequence[str], version: int) -> PushState:
        """Probe the servers, choose their transports, and pause them."""
        wait(self._cleaning, timeout=2 * CLEANING_S)
        self._cleaning = [task for task in self._cleaning if not task.done()]
        settings = self._settings
        for url in urls:
            seats = self._gpus.servers.get(url, ())
            self._servers.setdefault(url, Server(url, settings.token, self._hf_config, settings.timeout_s, seats))
        self._num_pushes += 1
        due = settings.check_every and self._num_pushes % settings.check_every == 0
        flush, servers = settings.pause_mode != "in_place", {url: self._servers[url] for url in urls}
        state = PushState(servers, self._threads, version, flush_cache=flush, checks=bool(due))
        with state.clock("join"):
            state.each(Server.probe)
            on_gpu, is_cut = torch.cuda.is_available(), ranks_of_copy() > 1
            state.choose(settings.transport, on_gpu=on_gpu, is_cut=is_cut, gpus=self._gpus.trainer)
        with state.clock("pause"):
            state.each(lambda server: server.engine.pause(settings.pause_mode))
            state.each(Server.open)
        return state

    def _deliver(self, model: Model, state: PushState) -> None:
        """Send the weights by each server's fastest transport, after a failure by its next one, and verify them."""
        while waiting := state.waiting():
            if slices := next((each for each in SLICES if each in waiting.values()), None):
                assert self._sender is not None, "a push makes the sender first"
                urls = [url for url, transport in waiting.items() if transport == slices]
                offers = broadcast_json({"slices": self._sender.offers(state, urls, slices)})["slices"]
                check_slices(state, self._sender.send(model, offers, self._sizes, state))
            else:
                mapped = [state.targets[url].server for url, transport in waiting.items() if transport == "mapped"]
                self._send_buckets(model, state, broadcast_json({"handles": wanted_handles(mapped)})["handles"])
        compare_slices_with_whole(state)
        self._compare_with_folder(model, state)

    def _send_buckets(self, model: Model, state: PushState, handles: dict[str, int]) -> None:
        """One round of buckets.  `handles`: which GPUs' memory servers map, and by how many of their ranks."""
        with (
            self._whole_tensors(model, state.clock) as stream,
            closing(BucketDelivery(state)) as delivery,
        ):
            layouts = [state.targets[url].server.capabilities.layout for url in delivery.transports]
            expected = ExpectedDigests(layouts, self._hf_config, self._sizes)
            for bucket in self._buckets(stream, state.clock, delivery.new_buffer):
                delivery.wait()  # for the bucket before this one, which servers loaded while this one was filled
                # A collective: by now the memory of the bucket before is free on all ranks.
                texts = exchange(bucket, handles, self._gpus.trainer) if handles else None
                delivery.send(bucket, texts)
                with state.clock("verify"):
                    expected.add(bucket)
            delivery.wait()
            check_whole_tensors(state, delivery.transports, expected)

    def _compare_with_folder(self, model: Model, state: PushState) -> None:
        """Let servers whose digests cannot be computed read an exported folder; drop those that stay unverified."""
        reason = "there is none that it can read, expected a source_folder, and an export_folder that it sees"
        if state.needs_folder and self._readers(state):
            folder = self._settings.export_folder
            try:
                folder = folder or _folder_with_room(self._sizes)
                self._save(model, broadcast_json({"folder": folder})["folder"])
                with state.clock("compare"):
                    compare_with_folder(state, self._readers(state), folder)
            except (OSError, SafetensorError) as error:  # a full disk is not the fault of servers with digests
                reason = one_line(error)
                logger.warning("the servers were not compared with an exported folder: %s", reason)
            finally:
                if folder and self._settings.export_folder is None:
                    shutil.rmtree(folder, ignore_errors=True)
        drop_unverified(state, reason)

    def _readers(self, state: PushState) -> list[str]:
        """Servers whose digests cannot be computed and that can read an exported folder."""
        if self._source_folder is None:
            return []
        unknown = [url for url, server in state.left.items() if not server.capabilities.is_plain]
        return [url for url in unknown if self._settings.export_folder is not None or is_here(url)]

    def _finish(self, state: PushState, canary: Canary | None) -> PushReport:
        """Resume generation on the servers that hold the weights; failed servers stay paused and are cleaned up."""
        with state.clock("resume"):
            state.each(lambda server: server.engine.resume())
        if canary is not None:
            with state.clock("canary"):
                heard = state.each(lambda server: server.engine.prompt_log_probs(canary.prompt_ids))
            for url, reason in disagreement(canary, heard).items():
                state.drop(url, reason)
        failed = [target for target in state.targets.values() if target.failure is not None]
        wait([self._threads.submit(target.server.fence) for target in failed if not target.is_silent])
        self._cleaning += [self._threads.submit(target.server.abandon) for target in failed]
        for target in failed:
            del self._servers[target.server.url]
        return state.report(self._sizes)

    # ---- tensors

    def _whole_tensors(self, model: Model, clock: Clock) -> AbstractContextManager[Iterator[tuple[str, Tensor]]]:
        """The stream of all tensors, on the ranks of the first copy; a collective."""
        buffer_bytes = min(self._half_bucket, _GATHERED_BYTES)
        return to_its_end(hf_tensors(model, self._hf_config, dtype=self._dtype, buffer_bytes=buffer_bytes, clock=clock))

    def _buckets(
        self, stream: Iterator[tuple[str, Tensor]], clock: Clock, new_buffer: NewBuffer | None = None
    ) -> Iterator[Bucket]:
        return fill_buckets(stream, self._sizes, self._half_bucket, new_buffer=new_buffer, clock=clock)

    @property
    def _half_bucket(self) -> int:
        """Bytes of one of the two buckets that exist at a time."""
        assert self._bucket_bytes is not None, "a push computes it first"
        return max(1, self._bucket_bytes // 2)

    def _save(self, model: Model, folder: str) -> None:
        """Write the weights to a folder, from rank 0; a collective.  OSError or SafetensorError on rank 0."""
        assert self._source_folder is not None, "nothing is compared without a source folder"
        save_hf(model, self._hf_config, folder, source_folder=self._source_folder, dtype=self._dtype)


def _folder_with_room(sizes: Sizes) -> str:
    """A new temporary folder; OSError if its file system has less than twice the room that the weights need."""
    needed, free = sum(num_bytes(*size) for size in sizes.values()), shutil.disk_usage(tempfile.gettempdir()).free
    if free < 2 * needed:
        raise OSError(f"{tempfile.gettempdir()} has {free} bytes free, expected twice the model's {needed}")
    return tempfile.mkdtemp(prefix="megarl_push_")


def _use_device(device: int | None) -> None:
    """Set the CUDA device of a thread, which does not inherit it from the thread that starts it."""
    if device is not None:
        torch.cuda.set_device(device)
