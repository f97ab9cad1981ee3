"""Pushing only the adapters of a LoRA model; the servers keep the base weights.

No server is paused: each version is an adapter with a new name, completions ask for it by name, and running completions
keep the adapter they began with.  The servers compare the SHA-256 of every tensor.  A canary prompt is sent with the
new name, which checks the base weights too.
"""

from __future__ import annotations

import base64
import hashlib
import pickle
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.mcore.models.model import Model
from megarl.rollout.client import ServerClient, ServerError
from megarl.weights.hf.adapter import adapter_tensors, on_cpu, peft_config, settings_in
from megarl.weights.mapping.families import HFConfig
from megarl.weights.push.report import Clock, PushError, PushReport
from megarl.weights.verify.canary import Canary, disagreement


class AdapterPusher:
    """Exists on every rank; only world rank 0 talks to the servers.

    `keep`: number of adapters a server holds at a time; older ones are unloaded, when no completion uses them any more.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        hf_config: HFConfig,
        *,
        base_model: str,
        keep: int,
        timeout_s: float = 120.0,
    ) -> None:
        self._hf_config, self._base_model, self._keep = hf_config, base_model, keep
        self._engines = {url: ServerClient(url, token, timeout_s=timeout_s) for url in urls}
        self._held: dict[str, deque[str]] = defaultdict(deque)  # url -> names of adapters, the oldest first
        self._num_pushes = 0

    def push(
        self, model: Model, version: int, *, only: Sequence[str] | None = None, canary: Canary | None = None
    ) -> PushReport | None:
        """Every rank calls it; world rank 0 gets the report, with the adapter's name for completions.

        `only`: push to these urls only.  Peak extra memory on rank 0: the adapters three times.
        """
        self._num_pushes += 1
        if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
            return None
        stream = adapter_tensors(model, self._hf_config)
        try:
            if dist.get_rank() != 0:
                return None
            clock = Clock()
            with clock("gather"):
                tensors = on_cpu(stream)
        finally:
            deque(stream, maxlen=0)  # finish the stream's collectives: the other ranks wait in them
        name = f"actor-{version}-{self._num_pushes}"  # a server refuses a name that it has had before
        urls = list(self._engines) if only is None else list(only)
        config = peft_config(settings_in(model), self._base_model)
        failed = self._give(urls, name, tensors, config, canary, clock)
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
        tensors: dict[str, Tensor],
        config: Mapping[str, Any],
        canary: Canary | None,
        clock: Clock,
    ) -> dict[str, str]:
        """url -> why it does not have the adapter."""
        failed: dict[str, str] = {}
        heard: dict[str, Sequence[float]] = {}

        def one(url: str) -> None:
            engine = self._engines[url]
            try:
                self._drop_old(url)
                give_adapter(engine, name, tensors, config)
                self._held[url].append(name)
                if canary is not None:
                    heard[url] = engine.prompt_log_probs(canary.prompt_ids, adapter=name)
            except (PushError, ServerError) as error:
                failed[url] = str(error)

        with clock("send"), ThreadPoolExecutor(max(1, len(urls)), thread_name_prefix="push_adapter") as threads:
            list(threads.map(one, urls))
        return failed | (disagreement(canary, heard) if canary is not None else {})

    def _drop_old(self, url: str) -> None:
        held = self._held[url]
        while len(held) >= self._keep:
            try:
                self._engines[url].unload_adapter(held.popleft())
            except ServerError as error:
                if error.status != 400:  # 400: the server was restarted and has no such adapter
                    raise


def give_adapter(engine: ServerClient, name: str, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> None:
    """Load a complete adapter into one server; PushError if the server refuses it."""
    # Pickled here, with the bytes inside: SGLang unpickles only tensors.
    payload = base64.b64encode(pickle.dumps(tensors)).decode()
    digests = {n: hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy().data).hexdigest() for n, t in tensors.items()}
    try:
        tp_size = int(engine.server_info().get("tp_size", 1))
        engine.load_adapter(name, config, payload, digests, tp_size=tp_size)
    except ServerError as error:
        if error.status == 404:
            raise PushError(f"{engine.url} takes no adapters; expected actor.lora.push=merged") from error
        raise PushError(f"{engine.url} did not take the adapter {name}: {error.message}") from error
