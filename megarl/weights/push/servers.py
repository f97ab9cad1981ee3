"""One rollout server of a push: its properties, the requests to it, its weight group, and the check of its weights."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megarl.config.tried import untried
from megarl.layout import numbers_of
from megarl.rollout.client import ServerClient, ServerError
from megarl.rollout.protocol import DTYPE_NAMES, Route
from megarl.rollout.reply_sizes import digest_bytes
from megarl.servers.nccl import paired_variables
from megarl.weights.mapping.blocks import HFConfig
from megarl.weights.mapping.families import stacks_for
from megarl.weights.mapping.names import ShardCoordinate, some_names
from megarl.weights.mapping.server_map import EngineKind, coordinates, is_enlarged
from megarl.weights.push.buckets import Bucket
from megarl.weights.push.channel import Meeting, leave, meet
from megarl.weights.push.report import PushError
from megarl.weights.push.shared import message
from megarl.weights.verify.digests import Kind

_MOST_RANKS = 4096  # of one server; what claims more is no size
_TRANSFER_S = 24 * 3600.0  # limit of orders whose time grows with the model: the call of the ranks ends before
CLEANING_S = 5.0  # the timeout of each request to a server that has already failed
# How servers of these formats read a folder: one that started with random weights would read none in its own way.  The
# loader of flash_rl refuses to load twice, and what it made of the model quantizes what any other loader brings.
_OTHER_FORMATS = {"dummy": "auto", "flash_rl": "auto"}
RECEIVER = "megarl.weights.push.receiver.load"  # the custom weight loader of servers in sharded transfers


@dataclass(frozen=True)
class Nature:
    """What a server reports about itself."""

    engine: EngineKind
    coordinates: tuple[ShardCoordinate, ...]  # of its ranks
    hashes: Kind
    first_gpu: int | None  # None: on a CPU
    is_plain: bool  # it holds the tensors unchanged, cut over its ranks as our tables say: not quantized or padded
    has_receiver: bool
    is_stacked: bool  # its experts are stacked in tensors of which the trainer's parameters are no slices
    started: str  # differs after a restart
    disk_format: str | None = None  # SGLang's name of the way in which it reads a folder; None: its own

    @classmethod
    def read(cls, info: Mapping[str, Any], hf_config: HFConfig) -> Nature:
        """`info`: the reply of /server_info.  Raises ValueError or TypeError if it cannot be that of a server."""
        on_gpu, tp, ep = info.get("device", "cpu") != "cpu", _size(info, "tp_size"), _size(info, "ep_size")
        engine: EngineKind = "hf" if info.get("version") == "megarl-hf" else "sglang"
        attention_dp, is_stacked = _size(info, "attn_dp_size"), bool(stacks_for(hf_config))
        if tp % ep or tp % attention_dp:
            raise ValueError(f"tp_size={tp}: expected a multiple of ep_size={ep} and of attn_dp_size={attention_dp}")
        return cls(
            engine=engine,
            coordinates=tuple(coordinates(tp, ep, attention_dp)),
            hashes="words" if on_gpu else "sha256",
            first_gpu=int(info.get("base_gpu_id") or 0) if on_gpu else None,
            is_plain=info.get("quantization") is None
            and next(untried(info), None) is None
            # Otherwise the head is cut over all ranks although attention is data parallel.
            and (attention_dp == 1 or bool(info.get("enable_dp_lm_head")))
            # Otherwise SGLang makes the shared expert one more of the others.
            and not (on_gpu and hf_config.get("n_shared_experts") and not info.get("disable_shared_experts_fusion"))
            and not (is_stacked and engine == "sglang")
            and (on_gpu or not is_enlarged(engine, hf_config, tp)),
            has_receiver=RECEIVER in (info.get("custom_weight_loader") or ()),
            is_stacked=is_stacked,
            started=json.dumps(info.get("startup_time"), sort_keys=True),
            disk_format=_OTHER_FORMATS.get(str(info.get("load_format"))),
        )


def _size(info: Mapping[str, Any], key: str) -> int:
    size = int(info.get(key) or 1)
    if not 0 < size <= _MOST_RANKS:
        raise ValueError(f"{key}={size}: expected at most {_MOST_RANKS}")
    return size


@dataclass(frozen=True)
class Spent:
    """Seconds of one bucket on one server."""

    send: float  # until the bytes had left
    total: float  # until the server had loaded them


class Server:
    """Each method raises ServerError, PushError or torch's RuntimeError within `timeout_s`."""

    def __init__(self, url: str, token: str, hf_config: HFConfig, timeout_s: float, gpus: Sequence[str] = ()) -> None:
        """`gpus`: the GPUs of its ranks, by names that are unique over all machines; empty: not known."""
        self.url, self._token, self._hf_config, self._timeout_s = url, token, hf_config, timeout_s
        self.gpus = tuple(gpus)
        self.engine = ServerClient(url, token, timeout_s=timeout_s)
        self.nature: Nature
        self.held: list[dict[str, str]] = []  # checksums of its ranks when they were last read
        # Of the last good push whose checksums were not all computed here: its checksums, and a text for its weights.
        self.held_then: list[dict[str, str]] = []
        self.pushed = ""
        self.fits_slices: bool | None = None  # do slices leave this process the same as whole tensors? None: unknown
        self._started = ""
        self._is_open = False
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""

    # ---- orders

    def probe(self) -> None:
        """Read its properties; a dead server fails here, before others wait for it, and a restart is detected."""
        self.nature = self._ask(self.engine)
        if self._started and self.nature.started != self._started:
            self.held, self.held_then, self.pushed, self._is_open = [], [], "", False
            self.fits_slices = None
            self.leave()
        self._started = self.nature.started

    def _ask(self, engine: ServerClient) -> Nature:
        info = engine.server_info()
        with engine.reading(Route.SERVER_INFO):
            return Nature.read(info, self._hf_config)

    def pause(self, mode: str) -> None:
        self.engine.pause(mode)

    def open(self) -> None:
        """Begin an update, unless one is open; an update that another client left open is ended first."""
        if self._is_open:
            return
        try:
            self.engine.begin_update()
        except ServerError as error:
            if "already" not in error.message:
                raise
            self.engine.end_update()
            self.engine.begin_update()
        self._is_open = True

    def close_update(self) -> None:
        if self._is_open:
            self._is_open = False
            self.engine.end_update()

    def resume(self) -> None:
        self.engine.resume()

    def is_there(self) -> bool:
        """Whether the process of the last probe still answers."""
        engine = ServerClient(self.url, self._token, timeout_s=min(CLEANING_S, self._timeout_s))
        try:
            return self._ask(engine).started == self._started
        except ServerError:
            return False
        finally:
            engine.close()

    # ---- weights over a group

    def join(self, backend: str) -> None:
        """Make a group with the server's ranks, with this process as rank 0, unless there is one."""
        if self._group is not None:
            return
        if self.nature.has_receiver:
            self.greet(backend)
        meeting, listener = Meeting.host(self.url, 1 + len(self.nature.coordinates), backend, self._timeout_s)
        self._group = meet(meeting, listener, lambda: self.invite(meeting, rank_offset=1))
        self._group_name = meeting.name

    def invite(self, meeting: Meeting, rank_offset: int) -> None:
        self.engine.init_group(
            meeting.address,
            meeting.port,
            rank_offset=rank_offset,
            world_size=meeting.world_size,
            group_name=meeting.name,
            backend=meeting.backend,
        )

    def send(self, bucket: Bucket, version: int | None, flush_cache: bool) -> Spent:
        """Broadcast a bucket; the server loads it.  A refusal is raised at once, while the broadcast still waits."""
        start = time.perf_counter()
        sent: list[float] = []
        work = self._broadcast(bucket)
        work.get_future().add_done_callback(lambda _: sent.append(time.perf_counter()))
        self._receive(bucket, version, flush_cache)
        work.wait(timedelta(seconds=self._timeout_s))
        end = time.perf_counter()
        return Spent((sent[0] if sent else end) - start, end - start)

    def _broadcast(self, bucket: Bucket) -> Any:
        assert self._group is not None, f"{self.url} has no weight group"
        return dist.broadcast(bucket.data, src=0, group=self._group, async_op=True)

    def _receive(self, bucket: Bucket, version: int | None, flush_cache: bool) -> None:
        """Blocks until the server has received the broadcast and loaded the tensors."""
        self.engine.update_from_distributed(
            bucket.names,
            [DTYPE_NAMES[bucket.dtype]] * len(bucket.names),
            bucket.shapes,
            group_name=self._group_name,
            version=version,
            flattened=True,
            flush_cache=flush_cache,
        )

    def map(self, texts: Sequence[str], version: int | None, flush_cache: bool) -> Spent:
        """Make it load a bucket from memory shared with senders on this machine; one text for each rank."""
        start = time.perf_counter()
        self.engine.update_from_tensor(texts, version=version, flush_cache=flush_cache)
        return Spent(0.0, time.perf_counter() - start)

    def take_part(self, texts: Sequence[str], version: int, flush_cache: bool) -> None:
        """Make its ranks receive slices; returns at the end of the transfer.  Each wait inside has its own timeout."""
        engine = ServerClient(self.url, self._token, timeout_s=_TRANSFER_S)
        try:
            engine.update_from_tensor(texts, load_format=RECEIVER, version=version, flush_cache=flush_cache)
        finally:
            engine.close()

    def greet(self, backend: str) -> None:
        """Call its receiver on each rank: it can be called, and NCCL, if it is the backend, has the same variables.

        Done before any rank waits for it in a group, which would hang.
        """
        self.open()  # a failed faster transport has closed the update
        hello = message(json.dumps({"nccl": paired_variables(backend)}))
        self.engine.update_from_tensor([hello] * len(self.nature.coordinates), load_format=RECEIVER, flush_cache=False)

    def leave(self) -> None:
        """Close the group on both sides, as far as the server still answers."""
        if self._group is not None:
            group, self._group = self._group, None
            engine = ServerClient(self.url, self._token, timeout_s=min(CLEANING_S, self._timeout_s))
            leave(engine, self._group_name, group)
            engine.close()

    def fence(self) -> None:
        """After a failure: pause it, if it still answers.  Raises nothing."""
        engine = ServerClient(self.url, self._token, timeout_s=min(CLEANING_S, self._timeout_s))
        with suppress(ServerError):
            engine.pause("retract")
        engine.close()

    def abandon(self) -> None:
        """After a failure: leave its group and end an open update.  Raises nothing; may take `timeout_s`."""
        engine = ServerClient(self.url, self._token, timeout_s=min(CLEANING_S, self._timeout_s))
        if self._is_open:
            with suppress(ServerError):
                engine.end_update()
        engine.close()
        self.engine.close()
        self.leave()

    # ---- the check

    def look(self) -> list[dict[str, str]]:
        """Checksums of each of its ranks; the update is ended first, because SGLang then post-processes the weights."""
        self.close_update()
        self.held = self.engine.rank_checksums(reply_bytes_of_digests(self._hf_config, len(self.nature.coordinates)))
        return self.held

    def remember(self, weights: str) -> None:
        """Store its present checksums as those of a good push of `weights`."""
        self.held_then, self.pushed = self.held, weights

    def verify(self, expected: Sequence[Mapping[str, str]], tied: Mapping[str, str]) -> int:
        """Compare its ranks' digests with the expected ones; returns the number of equal digests, or PushError."""
        self.look()
        if len(self.held) != len(expected):
            raise PushError(f"{self.url} answered for {len(self.held)} ranks, expected {len(expected)}")
        for rank, (held, sent) in enumerate(zip(self.held, expected, strict=True)):
            check_digests(self.url if len(expected) == 1 else f"rank {rank} of {self.url}", held, sent, tied)
        return sum(len(sent) for sent in expected)

    def compare(self, folder: str, version: int) -> None:
        """PushError unless it holds the same before and after reading the model in `folder`."""
        before = self.held
        engine = ServerClient(self.url, self._token, timeout_s=_TRANSFER_S)
        try:
            engine.update_from_disk(folder, version=version, flush_cache=False, load_format=self.nature.disk_format)
        finally:
            engine.close()
        for rank, (held, read) in enumerate(zip(before, self.look(), strict=True)):
            differ = [name for name in held | read if held.get(name) != read.get(name)]
            if differ:
                where = f"rank {rank} of {self.url}"
                raise PushError(f"{where} holds other weights after reading {folder} than before: {some_names(differ)}")


def reply_bytes_of_digests(hf_config: HFConfig, num_ranks: int) -> int:
    """The most that the checksums of a server may take."""
    numbers = numbers_of(hf_config)
    of_experts = 8 * (numbers.num_experts or 0)  # matrices and, where there are any, their biases or scales
    return digest_bytes((64 + of_experts) * ((numbers.num_hidden_layers or 0) + 4), num_ranks)


def check_digests(who: str, held: Mapping[str, str], sent: Mapping[str, str], tied: Mapping[str, str]) -> None:
    """PushError unless the server holds exactly the tensors that were sent.

    `tied`: names that a server may hold in addition, if they equal the tensor that they are tied to.
    """
    differ = [name for name in sent if name in held and held[name] != sent[name]]
    missing = [name for name in sent if name not in held]
    extra = [name for name in held if name not in sent and held[name] != sent.get(tied.get(name, ""))]
    parts = [("differ", differ), ("missing", missing), ("never sent", extra)]
    faults = [f"{what}: {some_names(names)}" for what, names in parts if names]
    if faults:
        raise PushError(f"{who} does not hold the weights that the trainer sent ({'; '.join(faults)})")
