"""Pushes the trainer's weights to the servers, and verifies that they arrived.

There are three transports.  `gathered`: rank 0 gathers every tensor and broadcasts it in buckets over a weight group
with each server.  `shared`: a server on the same machine maps the buckets.  `sharded`: every rank sends its slices
straight to the server ranks that need them.  If a transport fails, the push falls back to a slower one.  Each server is
paused, gets the weights and reports the digests of what it then holds.  It resumes generation only if they equal the
digests that the trainer computed.  The first time that a server process gets slices, it must also hold the same after
whole tensors.  A server that fails stays paused and is named in the report; the others wait for it no longer than its
timeout.
"""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError

from megarl.mcore.models.model import Model
from megarl.weights.hf.export import hf_sizes, hf_tensors, save_hf
from megarl.weights.mapping.blocks import HFConfig
from megarl.weights.mapping.names import num_bytes
from megarl.weights.push.agreement import broadcast_json
from megarl.weights.push.buckets import Sizes, bucket_bytes_for, fill_buckets
from megarl.weights.push.channel import is_here
from megarl.weights.push.delivery import BucketRound
from megarl.weights.push.gpu_handles import Gpus, exchange, wanted_handles
from megarl.weights.push.report import Clock, PushError, PushReport, one_line
from megarl.weights.push.routes import message_bytes_of
from megarl.weights.push.servers import CLEANING_S, Server
from megarl.weights.push.sharded import ShardedSender
from megarl.weights.push.targets import TRANSPORTS, Lead, Targets
from megarl.weights.verify.canary import Canary, disagreement
from megarl.weights.verify.cross_check import compare_with_whole, look_at_slices

__all__ = ["Canary", "PushError", "PushReport", "Pusher"]

logger = logging.getLogger("megarl.push")

_MAX_THREADS = 512  # one for each concurrent request to a server
_GATHERED_BYTES = 256 << 20  # the most that is gathered at a time; a bucket takes several such parts


class Pusher:
    """Exists on every rank; groups are made when they are first needed, and again for a server that was restarted.

    Peak extra memory: `bucket_bytes`, or twice the largest tensor, on each rank that sends whole tensors (also after
    the first slices), and what `hf_tensors` needs to gather them; or what `ShardedSender` says.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        hf_config: HFConfig,
        *,
        dtype: torch.dtype | None = None,
        transport: str = "auto",
        bucket_bytes: int | None = None,
        timeout_s: float = 120.0,
        pause_mode: str = "retract",
        check_every: int = 0,
        source_folder: str | Path | None = None,
        export_folder: str | Path | None = None,
        gpus: Gpus | None = None,
    ) -> None:
        """`dtype`: the servers' dtype (None: the trainer's); `timeout_s` limits every single wait; `gpus`: the GPUs of
        the trainer and its servers, as far as they are known.  `pause_mode`: abort | retract | in_place (running
        completions go on, with new weights and their old KV cache).  `bucket_bytes`: of the two buckets that exist
        at a time; None: by the size of the model and the free memory.

        Every `check_every`-th push (0: none), servers that get slices get whole tensors too, as the first time.  A
        server whose digests cannot be computed, such as one with quantized weights, loads the model from a folder at
        its first push and every `check_every`-th one, and must then have the same checksums as after the push; it is
        dropped if that is not possible the first time.  The folder is written for such servers only, with the files of
        `source_folder`: `export_folder`, which all servers must be able to read; None: a temporary folder, for servers
        on this machine only, which is deleted again.
        """
        if transport not in ("auto", *TRANSPORTS):
            raise ValueError(f"transport={transport!r}: expected auto, {', '.join(TRANSPORTS)}")
        self._urls, self._token, self._hf_config, self._dtype = tuple(urls), token, hf_config, dtype
        self._transport, self._bucket_bytes, self._timeout_s = transport, bucket_bytes, timeout_s
        self._check_every, self._source_folder, self._export_folder = check_every, source_folder, export_folder
        self._pause_mode, self._gpus = pause_mode, gpus or Gpus()
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
        if self._sender is None:
            self._sizes = hf_sizes(model, self._hf_config, dtype=self._dtype)
            self._bucket_bytes = self._bucket_bytes or bucket_bytes_for(self._sizes)
            message_bytes = message_bytes_of(self._bucket_bytes)
            self._sender = ShardedSender(self._hf_config, message_bytes, self._timeout_s, self._threads)
        if dist.get_rank() != 0:
            while (order := broadcast_json(None)) is not None:
                self._follow(model, order)
            return None
        try:
            lead = self._begin(self._urls if only is None else only, version)
            while (order := self._next_order(lead)) is not None:
                self._follow(model, broadcast_json(order), lead)
        finally:
            broadcast_json(None)  # after an error too, so that the other ranks do not wait forever
        return self._finish(lead, canary)

    def close(self) -> None:
        """Leave all groups."""
        for server in self._servers.values():
            self._cleaning.append(self._threads.submit(server.leave))
        if self._sender is not None:
            self._sender.close()
        wait(self._cleaning)
        self._servers = {}

    # ---- what every rank does

    def _follow(self, model: Model, order: Any, lead: Lead | None = None) -> None:
        """Carry out one order of rank 0; with `lead`, as rank 0."""
        if order["what"] == "export":
            self._export(model, order["folder"], lead)
        elif order["what"] == "sharded":
            assert self._sender is not None, "a push makes the sender first"
            self._sender.send(model, order["offers"], self._sizes, lead)
        elif order["handles"] or in_first_copy():
            self._stream(model, order["handles"], lead)

    def _stream(self, model: Model, handles: dict[str, int], lead: Lead | None) -> None:
        """One round of buckets.  `handles`: which GPUs' memory servers map, and by how many of their ranks."""
        assert self._bucket_bytes is not None, "a push computes it first"
        clock, bucket_bytes = lead.targets.clock if lead else Clock(), max(1, self._bucket_bytes // 2)
        at_once = min(bucket_bytes, _GATHERED_BYTES)
        stream = hf_tensors(model, self._hf_config, dtype=self._dtype, buffer_bytes=at_once, clock=clock)
        round_: BucketRound | None = None
        try:
            if not handles and lead is None:
                return
            round_ = BucketRound(lead, self._hf_config, self._sizes) if lead else None
            new_buffer = round_.new_buffer if round_ else None
            for bucket in fill_buckets(stream, self._sizes, bucket_bytes, new_buffer=new_buffer, clock=clock):
                if round_:
                    round_.settle()  # the bucket before this one, which servers loaded while this one was filled
                # A collective: by now the memory of the bucket before is free on all ranks.
                texts = exchange(bucket, handles, self._gpus.trainer) if handles else None
                if round_:
                    round_.send(bucket, texts)
            if round_:
                round_.settle()
                round_.verify()
        finally:
            if round_:
                round_.close()
            deque(stream, maxlen=0)  # finish the stream's collectives: the other ranks wait in them

    def _export(self, model: Model, folder: str, lead: Lead | None) -> None:
        """Compare with what the servers hold after reading the same weights from a folder."""
        assert self._source_folder is not None, "nothing is compared without a source folder"
        try:
            save_hf(model, self._hf_config, folder, source_folder=self._source_folder, dtype=self._dtype)
            if lead:
                with lead.targets.clock("compare"):
                    order = lambda server: server.compare(folder, lead.version)  # noqa: E731
                    lead.compared |= set(lead.targets.each(order, self._readers(lead)))
        except (OSError, SafetensorError) as error:  # only on rank 0, which writes
            if lead:
                _go_without_folder(lead, error)
        finally:
            if lead and self._export_folder is None:
                shutil.rmtree(folder, ignore_errors=True)

    # ---- what rank 0 does

    def _begin(self, urls: Sequence[str], version: int) -> Lead:
        """Probe the servers, choose their transports, and pause them."""
        wait(self._cleaning, timeout=2 * CLEANING_S)
        self._cleaning = [task for task in self._cleaning if not task.done()]
        for url in urls:
            seats = self._gpus.servers.get(url, ())
            self._servers.setdefault(url, Server(url, self._token, self._hf_config, self._timeout_s, seats))
        targets = Targets({url: self._servers[url] for url in urls}, self._threads)
        with targets.clock("join"):
            targets.each(Server.probe)
            on_gpu, is_cut = torch.cuda.is_available(), _ranks_of_copy() > 1
            targets.choose(self._transport, on_gpu=on_gpu, is_cut=is_cut, gpus=self._gpus.trainer)
        with targets.clock("pause"):
            targets.each(lambda server: server.pause(self._pause_mode))
            targets.each(Server.open)
        self._num_pushes += 1
        due = self._check_every and self._num_pushes % self._check_every == 0
        return Lead(targets, version, flush_cache=self._pause_mode != "in_place", checks=bool(due))

    def _next_order(self, lead: Lead) -> dict[str, Any] | None:
        """What all ranks do next; None: all remaining servers have the weights."""
        waiting = lead.targets.waiting()
        if sharded := [url for url, transport in waiting.items() if transport == "sharded"]:
            assert self._sender is not None, "a push makes the sender first"
            return {"what": "sharded", "offers": self._sender.offers(lead, sharded)}
        look_at_slices(lead)
        if waiting := lead.targets.waiting():
            sharing = [lead.targets.left[url] for url, transport in waiting.items() if transport == "shared"]
            return {"what": "buckets", "handles": wanted_handles(sharing)}
        compare_with_whole(lead)
        if lead.compares and self._readers(lead):
            lead.compares = False
            try:
                folder = self._export_folder or _folder_with_room(self._sizes)
            except OSError as error:
                _go_without_folder(lead, error)
            else:
                return {"what": "export", "folder": str(folder)}
        lead.drop_unverified(
            "there is none that it can read, expected a source_folder, and an export_folder that it sees"
        )
        return None

    def _readers(self, lead: Lead) -> list[str]:
        """Servers whose digests cannot be computed and that can read an exported folder."""
        if self._source_folder is None:
            return []
        unknown = [url for url, server in lead.targets.left.items() if not server.nature.is_plain]
        return [url for url in unknown if self._export_folder is not None or is_here(url)]

    def _finish(self, lead: Lead, canary: Canary | None) -> PushReport:
        """Resume generation on the servers that hold the weights; failed servers stay paused and are cleaned up."""
        targets = lead.targets
        with targets.clock("resume"):
            targets.each(Server.resume)
        if canary is not None:
            with targets.clock("canary"):
                heard = targets.each(lambda server: server.engine.prompt_log_probs(canary.prompt_ids))
            for url, reason in disagreement(canary, heard).items():
                targets.drop(url, reason)
        failed = {url: self._servers.pop(url) for url in targets.failed}
        wait([self._threads.submit(server.fence) for url, server in failed.items() if url not in targets.silent])
        self._cleaning += [self._threads.submit(server.abandon) for server in failed.values()]
        return lead.report(self._sizes)


def _go_without_folder(lead: Lead, error: Exception) -> None:
    """Servers that were verified by digests stay in the push: a full disk is not their fault."""
    logger.warning("the servers were not compared with an exported folder: %s", one_line(error))
    lead.drop_unverified(one_line(error))


def _folder_with_room(sizes: Sizes) -> str:
    """A new temporary folder; OSError if its file system has less than twice the room that the weights need."""
    needed, free = sum(num_bytes(*size) for size in sizes.values()), shutil.disk_usage(tempfile.gettempdir()).free
    if free < 2 * needed:
        raise OSError(f"{tempfile.gettempdir()} has {free} bytes free, expected twice the model's {needed}")
    return tempfile.mkdtemp(prefix="megarl_push_")


def in_first_copy() -> bool:
    """Whether this rank belongs to the first copy of the model: rank 0 and the ranks that gather with it.

    Ranks of a pipeline stage are numbered by tensor-parallel rank first; for experts by expert-tensor-parallel rank,
    then expert-parallel rank.  So the ranks of a copy are consecutive within a stage.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return dist.get_rank() % (dist.get_world_size() // stages) < _ranks_of_copy() // stages


def _ranks_of_copy() -> int:
    """Number of ranks over which one copy of the model is gathered."""
    ps = parallel_state
    experts = ps.get_expert_tensor_parallel_world_size() * ps.get_expert_model_parallel_world_size()
    of_stage = math.lcm(ps.get_tensor_model_parallel_world_size(), experts)
    return of_stage * ps.get_pipeline_model_parallel_world_size()


def _use_device(device: int | None) -> None:
    """Set the CUDA device of a thread, which does not inherit it from the thread that starts it."""
    if device is not None:
        torch.cuda.set_device(device)
