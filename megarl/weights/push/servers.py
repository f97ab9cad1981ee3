"""One rollout server of a push: its capabilities, the requests to it, and its weight group."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from megarl.arch.layout import numbers_of
from megarl.arch.sglang_config import OVERRIDE, overrides
from megarl.arch.sglang_options import untried
from megarl.rollout.client import ServerClient, ServerError
from megarl.rollout.protocol import DTYPE_NAMES, Route, digest_bytes
from megarl.servers.launch import WEIGHT_LOADER
from megarl.servers.nccl import paired_variables
from megarl.servers.weight_group import groups_key
from megarl.weights.mapping.blocks import HFConfig
from megarl.weights.mapping.families import stacks_for
from megarl.weights.mapping.names import ShardCoordinate
from megarl.weights.mapping.server_map import EngineKind, coordinates, is_enlarged
from megarl.weights.push.buckets import Bucket
from megarl.weights.push.channel import Meeting, leave, meet
from megarl.weights.push.shared import message
from megarl.weights.verify.digests import Kind

_MOST_RANKS = 4096  # of one server; what claims more is no size
_SHARED_EXPERTS = ("n_shared_experts", "shared_expert_intermediate_size")  # keys of config.json that say of some
_OVERRIDES = OVERRIDE.removeprefix("--").replace("-", "_")
TRANSFER_S = 24 * 3600.0  # limit of orders whose time grows with the model: the call of the ranks ends before
CLEANING_S = 5.0  # the timeout of each request to a server that has already failed
# How servers of these formats read a folder: one that started with random weights would read none in its own way.  The
# loader of flash_rl refuses to load twice, and what it made of the model quantizes what any other loader brings.
_OTHER_FORMATS = {"dummy": "auto", "flash_rl": "auto"}


class ServerLayout(NamedTuple):
    """Servers of the same layout hold the same parameters under the same names, and hash them in the same way."""

    engine: EngineKind
    tp: int
    ep: int
    attention_dp: int
    hashes: Kind

    @property
    def coordinates(self) -> list[ShardCoordinate]:
        """The place of each of its ranks in its layout."""
        return coordinates(self.tp, self.ep, self.attention_dp)


@dataclass(frozen=True)
class ServerCapabilities:
    """What a server reports about itself."""

    layout: ServerLayout
    first_gpu: int | None  # None: on a CPU
    is_plain: bool  # it holds the tensors unchanged, cut over its ranks as our tables say: not quantized or padded
    has_receiver: bool
    is_stacked: bool  # its experts are stacked in tensors of which the trainer's parameters are no slices
    started: str  # differs after a restart
    drafts: bool = False  # it has a draft model, whose weights a push brings too
    disk_format: str | None = None  # SGLang's name of the way in which it reads a folder; None: its own

    @classmethod
    def read(cls, info: Mapping[str, Any], hf_config: HFConfig) -> ServerCapabilities:
        """`info`: the reply of /server_info.  Raises ValueError or TypeError if it cannot be that of a server."""
        on_gpu = info.get("device", "cpu") != "cpu"
        tp = _size(info, "tp_size")
        ep = _size(info, "ep_size")
        engine: EngineKind = "hf" if info.get("version") == "megarl-hf" else "sglang"
        attention_dp, is_stacked = _size(info, "attn_dp_size"), bool(stacks_for(hf_config))
        has_shared_experts = any(hf_config.get(name) for name in _SHARED_EXPERTS)
        told, wanted = info.get(_OVERRIDES) or "{}", overrides(hf_config) or "{}"
        if engine == "sglang" and json.loads(told) not in ({}, json.loads(wanted)):  # {}: its folder says all of it
            raise ValueError(f"{_OVERRIDES}={told}: expected {wanted}, as the trainer reads this model's config.json")
        if tp % ep or tp % attention_dp:
            raise ValueError(f"tp_size={tp}: expected a multiple of ep_size={ep} and of attn_dp_size={attention_dp}")
        return cls(
            layout=ServerLayout(engine, tp, ep, attention_dp, "words" if on_gpu else "sha256"),
            first_gpu=int(info.get("base_gpu_id") or 0) if on_gpu else None,
            is_plain=info.get("quantization") is None
            and next(untried(info), None) is None
            # Otherwise the head is cut over all ranks although attention is data parallel.
            and (attention_dp == 1 or bool(info.get("enable_dp_lm_head")))
            # Otherwise SGLang makes the shared expert one more of the others.
            and not (on_gpu and has_shared_experts and not info.get("disable_shared_experts_fusion"))
            and not (is_stacked and engine == "sglang")
            and (on_gpu or not is_enlarged(engine, hf_config, tp)),
            has_receiver=WEIGHT_LOADER in (info.get("custom_weight_loader") or ()),
            is_stacked=is_stacked,
            started=json.dumps(info.get("startup_time"), sort_keys=True),
            drafts=info.get("speculative_algorithm") is not None,
            disk_format=_OTHER_FORMATS.get(str(info.get("load_format"))),
        )


def _size(info: Mapping[str, Any], key: str) -> int:
    size = int(info.get(key) or 1)
    if not 0 < size <= _MOST_RANKS:
        raise ValueError(f"{key}={size}: expected at most {_MOST_RANKS}")
    return size


class Server:
    """Each method raises ServerError or torch's RuntimeError within `timeout_s`."""

    def __init__(self, url: str, token: str, hf_config: HFConfig, timeout_s: float, gpus: Sequence[str] = ()) -> None:
        """`gpus`: the GPUs of its ranks, by names that are unique over all machines; empty: not known."""
        self.url = url
        self._token = token
        self._hf_config = hf_config
        self._timeout_s = timeout_s
        self._cleaning_s = min(CLEANING_S, timeout_s)  # limit of a request after a failure
        self.gpus = tuple(gpus)
        self.engine = ServerClient(url, token, timeout_s=timeout_s)
        self.capabilities: ServerCapabilities
        self.checksums: list[dict[str, str]] = []  # of its ranks, when they were last read
        # The last good push whose checksums were not all computed here: its checksums, and a text for its weights.
        self.baseline: list[dict[str, str]] = []
        self.baseline_weights = ""
        self.fits_slices: bool | None = None  # do slices leave this process the same as whole tensors? None: unknown
        self._started = ""
        self._is_open = False
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""

    def _client(self, limit_s: float) -> closing[ServerClient]:
        """Another client with its own time limit."""
        return closing(ServerClient(self.url, self._token, timeout_s=limit_s))

    # ---- orders

    def probe(self) -> None:
        """Read its properties; a dead server fails here, before others wait for it, and a restart is detected."""
        self.capabilities = self._read_capabilities(self.engine)
        if self._started and self.capabilities.started != self._started:
            self.checksums = []
            self.baseline = []
            self.baseline_weights = ""
            self._is_open = False
            self.fits_slices = None
            self.leave()
        self._started = self.capabilities.started

    def _read_capabilities(self, engine: ServerClient) -> ServerCapabilities:
        info = engine.server_info()
        with engine.reading(Route.SERVER_INFO):
            return ServerCapabilities.read(info, self._hf_config)

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

    def is_there(self) -> bool:
        """Whether the process of the last probe still answers."""
        with self._client(self._cleaning_s) as engine:
            try:
                return self._read_capabilities(engine).started == self._started
            except ServerError:
                return False

    # ---- weights over a group

    def join(self, backend: str) -> None:
        """Make a group with the server's ranks, with this process as rank 0, unless there is one."""
        if self._group is not None:
            return
        key = None  # a server without our plug-in knows torch's own store alone
        if self.capabilities.has_receiver:
            self.ping_receiver(backend)
            key = groups_key(self._token)
        meeting, host = Meeting.host(self.url, 1 + self.capabilities.layout.tp, backend, self._timeout_s, key)
        self._group = meet(meeting, host, lambda: self.invite(meeting, rank_offset=1))
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

    def send(self, bucket: Bucket, version: int | None, flush_cache: bool) -> float:
        """Broadcast a bucket; the server loads it.  Returns the seconds until the bytes had left.

        A refusal is raised at once, while the broadcast still waits.
        """
        start = time.perf_counter()
        sent: list[float] = []
        work = self._broadcast(bucket)
        work.get_future().add_done_callback(lambda _: sent.append(time.perf_counter()))
        self._receive(bucket, version, flush_cache)
        work.wait(timedelta(seconds=self._timeout_s))
        return (sent[0] if sent else time.perf_counter()) - start

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
            flush_cache=flush_cache,
        )

    def map(self, texts: Sequence[str], version: int | None, flush_cache: bool) -> float:
        """Make it load a bucket from memory shared with senders on this machine; one text for each rank.

        Returns the seconds in which bytes are sent, as `send` does: none.
        """
        self.engine.update_from_tensor(texts, version=version, flush_cache=flush_cache)
        return 0.0

    def receive_slices(self, texts: Sequence[str], version: int, flush_cache: bool) -> None:
        """Make its ranks receive slices; returns at the end of the transfer.  Each wait inside has its own timeout."""
        with self._client(TRANSFER_S) as engine:
            engine.update_from_tensor(texts, load_format=WEIGHT_LOADER, version=version, flush_cache=flush_cache)

    def ping_receiver(self, backend: str) -> None:
        """Call its receiver on each rank: it answers, and NCCL, if it is the backend, has the same variables.

        Done before any rank waits for it in a group, which would hang.
        """
        self.greet([message(json.dumps({"nccl": paired_variables(backend)}))] * self.capabilities.layout.tp)

    def greet(self, texts: Sequence[str]) -> None:
        """The same with a text for each rank, and with memory of ours that it maps for the next transfer."""
        self.open()  # a failed faster transport has closed the update
        self.engine.update_from_tensor(texts, load_format=WEIGHT_LOADER, flush_cache=False)

    def leave(self) -> None:
        """Close the group on both sides, as far as the server still answers."""
        if self._group is not None:
            group, self._group = self._group, None
            with self._client(self._cleaning_s) as engine:
                leave(engine, self._group_name, group)

    def fence(self) -> None:
        """After a failure: pause it, if it still answers.  Raises nothing."""
        with self._client(self._cleaning_s) as engine, suppress(ServerError):
            engine.pause("retract")

    def abandon(self) -> None:
        """After a failure: leave its group and end an open update.  Raises nothing; may take `timeout_s`."""
        if self._is_open:
            with self._client(self._cleaning_s) as engine, suppress(ServerError):
                engine.end_update()
        self.engine.close()
        self.leave()

    # ---- what the checks of a push need

    def read_checksums(self) -> list[dict[str, str]]:
        """Checksums of each of its ranks; the update is ended first, because SGLang then post-processes the weights."""
        self.close_update()
        limit = reply_bytes_of_digests(self._hf_config, self.capabilities.layout.tp)
        self.checksums = self.engine.rank_checksums(limit)
        return self.checksums

    def set_baseline(self, weights: str) -> None:
        """Store its present checksums as those of a good push of `weights`."""
        self.baseline, self.baseline_weights = self.checksums, weights

    def load_folder(self, folder: str, version: int) -> None:
        """Make it read its weights from a folder."""
        with self._client(TRANSFER_S) as engine:
            load_format = self.capabilities.disk_format
            engine.update_from_disk(folder, version=version, flush_cache=False, load_format=load_format)


def reply_bytes_of_digests(hf_config: HFConfig, num_ranks: int) -> int:
    """The most that the checksums of a server may take."""
    numbers = numbers_of(hf_config)
    of_experts = 8 * (numbers.num_experts or 0)  # matrices and, where there are any, their biases or scales
    return digest_bytes((64 + of_experts) * ((numbers.num_hidden_layers or 0) + 4), num_ranks)
