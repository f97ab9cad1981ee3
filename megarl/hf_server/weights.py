"""Weight updates on the HF server: weight groups, the update session, and checks of names, shapes and dtypes.

The methods block (a rendezvous, a broadcast, a file), so the HTTP side calls them in threads; a lock serializes them.
Tensors are received into separate memory, and the engine's thread copies them into the model between two steps.  A
custom weight loader writes into the model directly, in that thread.  A refusal is a ValueError and leaves the model
unchanged, except when a transfer of such a loader fails halfway.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.hf_server.scheduler import HFEngine
from megarl.hf_server.shared_memory import one_payload, read_bucket, read_message
from megarl.rollout.protocol import DTYPES, FLATTENED, Route
from megarl.servers.launch import WEIGHT_LOADER
from megarl.servers.weight_group import KEY_VARIABLE, join_store, join_weight_group, leave_weight_group
from megarl.weights.push.report import one_line

_DEFAULT_GROUP = "weight_update_group"


class WeightUpdates:
    def __init__(self, engine: HFEngine, group_timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = group_timeout_s
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._session_open = False
        self._lock = threading.Lock()

    def init_group(self, body: Mapping[str, Any]) -> str:
        """Join a weight group; blocks until all members have joined or the timeout is over."""
        name, backend = _field(body, "group_name", str, _DEFAULT_GROUP), body.get("backend", "nccl")
        rank, world_size = _field(body, "rank_offset", int), _field(body, "world_size", int)
        address, port = _field(body, "master_address", str), _field(body, "master_port", int)
        if not 0 < rank < world_size:
            raise ValueError(f"rank_offset={rank}: expected 1 .. world_size-1 ({world_size - 1}); rank 0 sends")
        device = self._engine.model.device
        if backend != (expected := "nccl" if device.type == "cuda" else "gloo"):
            raise ValueError(
                f"backend={backend!r}: this server runs on {device.type} and speaks {expected}; expected a trainer on "
                f"{device.type} (trainer.device)"
            )
        if name in self._groups:
            raise ValueError(f"group_name={name!r}: this server is already in that group, expected a new name")
        try:  # outside the lock: a rendezvous without peers must not block other groups
            store = join_store(address, port, name, world_size, self._timeout_s, os.environ[KEY_VARIABLE])
            group = join_weight_group(store, rank, world_size, name, backend, self._timeout_s)
        except RuntimeError as error:  # torch's error for a failed rendezvous or a timeout
            raise ValueError(f"joining {name!r} at {address}:{port} failed: {one_line(error)}") from error
        with self._lock:
            self._groups[name] = group
        return f"joined {name} as rank {rank} of {world_size}"

    def destroy_group(self, body: Mapping[str, Any]) -> str:
        with self._lock:
            name = _field(body, "group_name", str, _DEFAULT_GROUP)
            leave_weight_group(self._group(name))
            del self._groups[name]
        return f"left {name}"

    def begin(self, body: Mapping[str, Any]) -> str:
        with self._lock:
            if self._session_open:
                raise ValueError(f"a weight update is open already: expected {Route.END_UPDATE} first")
            self._session_open = True
        return "weight update begun"

    def end(self, body: Mapping[str, Any]) -> str:
        with self._lock:
            self._check_open()
            self._session_open = False
        return "weight update ended"

    def from_distributed(self, body: Mapping[str, Any]) -> str:
        """Receive named tensors from rank 0 of a group; names, shapes and dtypes are checked before the broadcast."""
        with self._lock:
            self._check_open()
            group = self._group(_field(body, "group_name", str, _DEFAULT_GROUP))
            names, dtypes, shapes = (_field(body, key, list) for key in ("names", "dtypes", "shapes"))
            if not len(names) == len(dtypes) == len(shapes):
                raise ValueError(
                    f"{len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes: expected equally many"
                )
            model = self._engine.model
            model.check_weights(names, dtypes, shapes)
            model.check_memory()
            load_format = body.get("load_format")
            if load_format != FLATTENED:
                raise ValueError(f"load_format={load_format!r}: expected {FLATTENED!r}")
            self._check_flush(body)
            sizes = _sizes(names, dtypes, shapes)
            try:
                flat = torch.empty(sum(sizes), dtype=torch.uint8, device=model.device)
                # The wait has its own limit: with NCCL a wait without one returns before anything has arrived.
                limit = timedelta(seconds=self._timeout_s)
                dist.broadcast(flat, src=0, group=group, async_op=True).wait(limit)
            except RuntimeError as error:  # torch's error for a lost peer or a timeout
                raise ValueError(f"nothing was loaded, because the broadcast failed: {one_line(error)}") from error
            parts = zip(names, flat.split(sizes), dtypes, shapes, strict=True)
            return self._apply({name: part.view(DTYPES[kind]).view(shape) for name, part, kind, shape in parts}, body)

    def from_tensor(self, body: Mapping[str, Any]) -> str:
        """Load a bucket in memory that another process of this machine shares, or run the custom weight loader."""
        with self._lock:
            self._check_open()
            text, load_format = one_payload(_field(body, "serialized_named_tensors", list)), body.get("load_format")
            self._check_flush(body)
            if load_format == WEIGHT_LOADER:
                self._apply_loader(text, body)
                return f"ran {WEIGHT_LOADER}"
            if load_format != FLATTENED:
                raise ValueError(f"load_format={load_format!r}: expected {FLATTENED!r} or {WEIGHT_LOADER!r}")
            tensors = read_bucket(text)
            dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
            self._engine.model.check_weights(list(tensors), dtypes, [t.shape for t in tensors.values()])
            return self._apply(tensors, body)

    def from_disk(self, body: Mapping[str, Any]) -> str:
        with self._lock:
            self._check_flush(body)
            tensors = self._engine.model.read_folder(_field(body, "model_path", str))
            return self._apply(tensors, body)

    def _group(self, name: str) -> dist.ProcessGroup:
        if name not in self._groups:
            raise ValueError(f"group_name={name!r}: this server is in no such group, it is in {sorted(self._groups)}")
        return self._groups[name]

    def _check_open(self) -> None:
        if not self._session_open:
            raise ValueError(f"no weight update is open: expected {Route.BEGIN_UPDATE} first")

    def _check_flush(self, body: Mapping[str, Any]) -> None:
        """Refuse before a transfer what would be refused after it."""
        if self._engine.paused and body.get("flush_cache", True):
            self._engine.run_now(self._engine.flush_cache).result()

    def _apply(self, tensors: dict[str, Tensor], body: Mapping[str, Any]) -> str:
        """Load and drop the tensors: the sender waits until memory that it shares is released."""
        message = f"loaded {len(tensors)} tensors"

        def load() -> None:
            self._engine.model.load_weights(tensors)
            tensors.clear()

        self._order(load, body)
        return message

    def _apply_loader(self, text: str, body: Mapping[str, Any]) -> None:
        # Imported only when it is used, as SGLang does.
        module, _, name = WEIGHT_LOADER.rpartition(".")
        loader = getattr(import_module(module), name)
        model = SimpleNamespace(named_parameters=self._engine.model.weights.items)
        named_tensors = read_message(text)

        def load() -> None:
            try:
                loader(model, named_tensors)
            except RuntimeError as error:  # the loader's and torch's error for a failed transfer
                raise ValueError(f"the weights may be mixed, because the transfer failed: {one_line(error)}") from error

        self._order(load, body)

    def _order(self, load: Callable[[], None], body: Mapping[str, Any]) -> None:
        """Run `load` between two steps of the engine, and set the version with it."""
        version, flush = body.get("weight_version"), bool(body.get("flush_cache", True))
        version = None if version is None else str(version)
        if body.get("abort_all_requests"):
            self._engine.run_now(lambda: self._engine.abort(lambda row: True)).result()
        self._engine.run_alone(lambda: self._engine.load(load, version, flush=flush)).result()


def _sizes(names: list[str], dtypes: list[str], shapes: list[list[int]]) -> list[int]:
    """Bytes of the tensors of a bucket, one after another: each must start at a multiple of its item size."""
    sizes: list[int] = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if (start := sum(sizes)) % DTYPES[dtype].itemsize:
            raise ValueError(f"nothing was loaded, because {name} ({dtype}) would start at byte {start} of the bucket")
        sizes.append(math.prod(shape) * DTYPES[dtype].itemsize)
    return sizes


def _field(body: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """Whole numbers are of ports and ranks."""
    value = body.get(key, default)
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and not 0 <= value < 2**16):
        raise ValueError(f"{key}={value!r}: expected a {kind.__name__}{' from 0 to 65535' if kind is int else ''}")
    return value
