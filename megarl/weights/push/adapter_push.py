"""Pushing only the adapters of a LoRA model; the servers keep the base weights.

No server is paused: each version is an adapter with a new name, completions ask for it by name, and a running request
keeps the adapter it began with, until that is unloaded: then the request is ended, and the completion goes on with a
newer one.  The servers compare the SHA-256 of every tensor.  A canary prompt is sent with the new name, which checks
the base weights too.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore.models.lora import settings_in
from megarl.mcore.models.model import Model
from megarl.rollout.client import ServerClient, ServerError
from megarl.servers.launch import WEIGHT_LOADER
from megarl.weights.clock import Clock
from megarl.weights.hf.adapter import adapter_tensors, on_cpu, peft_config
from megarl.weights.hf.gather import to_its_end
from megarl.weights.mapping.blocks import HFConfig
from megarl.weights.push.buckets import Bucket
from megarl.weights.push.channel import is_here
from megarl.weights.push.report import PushError, PushReport, one_line
from megarl.weights.push.settings import PushSettings
from megarl.weights.push.shared import copied, forget, payload, shared_buffer
from megarl.weights.verify.canary import Canary, disagreement

logger = logging.getLogger("megarl.push")

OURS = "megarl-"  # begins the names of all adapters that a trainer pushes
_UNLOAD_S = 2.0  # after this time requests that still run with an adapter to unload are ended


@dataclass(frozen=True)
class Encoded:
    """A complete adapter as it is sent, to any number of servers."""

    config: Mapping[str, Any]  # PEFT's adapter_config.json
    bucket: Bucket  # in shared memory, if there is room
    digests: dict[str, str]

    @classmethod
    def of(cls, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> Encoded:
        """Tensors on the CPU, all of one dtype."""
        (dtype,) = {tensor.dtype for tensor in tensors.values()}
        raw = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in tensors.items()}
        num_bytes = sum(len(part) for part in raw.values())
        try:
            data = shared_buffer(num_bytes)
        except OSError as error:
            logger.warning("the adapter is sent to servers of this machine too: %s", one_line(error))
            data = torch.empty(num_bytes, dtype=torch.uint8)
        torch.cat(list(raw.values()), out=data)
        bucket = Bucket(list(tensors), [tuple(tensor.shape) for tensor in tensors.values()], dtype, data, is_last=True)
        return cls(config, bucket, {name: hashlib.sha256(part.numpy().data).hexdigest() for name, part in raw.items()})

    @cached_property
    def text(self) -> str:
        """With the bytes inside.  Pickled: SGLang unpickles only tensors."""
        return copied(self.bucket)


class AdapterPusher:
    """Exists on every rank; only world rank 0 talks to the servers.

    After a push a server holds `settings.adapters_kept` of this pusher's adapters.  Older ones are unloaded, and so are
    those of an earlier life of the ranks, which the servers outlive.  `life`: a name for this life, shared by the
    pushers of all its roles, whose adapters stay.
    """

    def __init__(self, settings: PushSettings, hf_config: HFConfig, *, base_model: str, life: str) -> None:
        self._hf_config = hf_config
        self._base_model = base_model
        self._keep = settings.adapters_kept
        limit_s = settings.timeout_s
        self._engines = {url: ServerClient(url, settings.token, timeout_s=limit_s) for url in settings.urls}
        # A server may hold adapters of earlier ranks and refuses a name that it has: each life has its own names.
        self._life = f"{OURS}{life}-"
        self._own = f"{self._life}{uuid.uuid4().hex[:8]}-"
        self._unmapped: set[str] = set()  # urls of servers on this machine that cannot map its memory
        self._num_pushes = 0

    def push(
        self, model: Model, version: int, *, only: Sequence[str] | None = None, canary: Canary | None = None
    ) -> PushReport | None:
        """Every rank calls it; world rank 0 gets the report, with the adapter's name for completions.

        `only`: push to these urls only.  Peak extra memory on rank 0: twice the adapters, of which a copy in shared
        memory stays as long as a server of this machine holds it; for servers of other machines 4/3 of their bytes as
        text, and again in the request to each of them.
        """
        clock = Clock()
        with to_its_end(adapter_tensors(model, self._hf_config)) as stream:
            if dist.get_rank() != 0:
                return None
            with clock("gather"):
                tensors = on_cpu(stream)
        urls = list(self._engines) if only is None else list(only)
        settings = settings_in(model)
        config = peft_config(settings, self._base_model, settings.targets)
        return self.deliver(urls, version, tensors, config, canary, clock)

    def deliver(
        self,
        urls: Sequence[str],
        version: int,
        tensors: dict[str, Tensor],
        config: Mapping[str, Any],
        canary: Canary | None,
        clock: Clock,
    ) -> PushReport:
        """Load a complete adapter into these servers.  `config`: PEFT's adapter_config.json."""
        self._num_pushes += 1
        name = f"{self._own}{self._num_pushes:08d}-v{version}"  # sorted by name they are sorted by age
        with clock("convert"):
            adapter = Encoded.of(tensors, config)
        try:
            failed = self._give(urls, name, adapter, canary, clock)
        finally:
            if adapter.bucket.data.is_shared():
                forget(adapter.bucket.data)
        transports = {url: "adapter" for url in urls if url not in failed}
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        verified = len(tensors) * len(transports)
        seconds = dict(clock.seconds)
        return PushReport(version, len(tensors), num_bytes, verified, transports, failed, {}, [], seconds, adapter=name)

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def _give(
        self,
        urls: Sequence[str],
        name: str,
        adapter: Encoded,
        canary: Canary | None,
        clock: Clock,
    ) -> dict[str, str]:
        """Load the adapter into the servers; returns url -> why one does not have it."""
        failed: dict[str, str] = {}
        heard: dict[str, Sequence[float]] = {}

        def one(url: str) -> None:
            engine = self._engines[url]
            try:
                for old in outdated(engine.adapters(), self._life, self._own, self._keep - 1):
                    unload(engine, old)
                give_adapter(engine, name, adapter, self._unmapped)
                if canary is not None:
                    heard[url] = engine.prompt_log_probs(canary.prompt_ids, adapter=name)
            except (PushError, ServerError) as error:
                failed[url] = _refusal(error) if isinstance(error, ServerError) else str(error)

        with clock("send"), ThreadPoolExecutor(max(1, len(urls)), thread_name_prefix="push_adapter") as threads:
            list(threads.map(one, urls))
        return failed | (disagreement(canary, heard) if canary is not None else {})


def outdated(names: Sequence[str], life: str, own: str, keep: int) -> list[str]:
    """A server's adapters to unload: those of other lives, and all but the newest `keep` of the pusher's own.

    `life`, `own`: how the names of this life begin, and those of the pusher in it.
    """
    others = [name for name in names if name.startswith(OURS) and not name.startswith(life)]
    of_this = sorted(name for name in names if name.startswith(own))
    return others + of_this[: max(0, len(of_this) - keep)]


def unload(engine: ServerClient, name: str) -> None:
    """Unload an adapter; requests that use it for longer than two more seconds are ended.

    A server waits with the unloading for these requests, and loads no other adapter meanwhile.  It can end one request
    or all, so it ends all: each returns its tokens, and its completion goes on in the next request.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="unload") as thread:
        unloading = thread.submit(engine.unload_adapter, name)
        while not wait([unloading], _UNLOAD_S).done:
            engine.abort(everything=True)
        unloading.result()


def give_adapter(engine: ServerClient, name: str, adapter: Encoded, unmapped: set[str]) -> None:
    """Load a complete adapter into one server; PushError if the server refuses it.

    `unmapped`: urls to which it is sent although they are here; one that only takes what is sent is added.
    """
    try:
        info = engine.server_info()
        tp_size, is_ours = int(info.get("tp_size", 1)), WEIGHT_LOADER in (info.get("custom_weight_loader") or ())
        may_map = is_ours and engine.url not in unmapped and adapter.bucket.data.is_shared()
        maps = may_map and info.get("nnodes", 1) == 1 and is_here(engine.url)
        if maps and _maps(engine, name, adapter, tp_size):
            return
        others = "" if is_ours else adapter.text
        engine.load_adapter(name, adapter.config, [adapter.text, *[others] * (tp_size - 1)], adapter.digests)
        if maps:
            unmapped.add(engine.url)
    except ServerError as error:
        if error.status == 404:
            raise PushError(_refusal(error)) from error
        raise PushError(f"{engine.url} did not take the adapter {name}: {error.message}") from error


def _maps(engine: ServerClient, name: str, adapter: Encoded, tp_size: int) -> bool:
    """Whether a server of this machine loads the adapter from shared memory, as one in another container cannot."""
    try:
        payloads = [payload(adapter.bucket) for _ in range(tp_size)]
        engine.load_adapter(name, adapter.config, payloads, adapter.digests)
    except ServerError as error:
        if error.status in (0, 404):
            raise
        logger.warning("%s does not map the adapter %s, which is sent: %s", engine.url, name, error.message)
        return False
    return True


def _refusal(error: ServerError) -> str:
    return f"{error.url} takes no adapters; expected actor.lora.push=merged" if error.status == 404 else str(error)
