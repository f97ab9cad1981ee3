"""Lets stock megatron-core run on a host without CUDA (torch's CPU build, gloo).  Does nothing if there is CUDA.

No code of Megatron is rewritten: inside torch the device name "cuda" means the CPU, and a few functions that only make
sense on a GPU become no-ops.  `activate()` runs once per process, before the first Megatron call, in the thread that
runs Megatron code.  Files and lines are those of megatron-core 0.16.1.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from megarl.mcore.freed_memory import keep_freed_memory

_active = False


class _CudaIsCpu(TorchFunctionMode):
    """Handles torch calls in which Megatron uses the literal name "cuda"."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:  # language_module:244 (tied embeddings across pipeline stages)
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizers compare type strings with 'torch.cuda.FloatTensor': clip_grads:167, optimizer:671,690.
            return func(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device", "")).startswith("cuda"):  # optimizer:473-907, clip_grads:90-207, schedules:596,983
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if "pin_memory" in kwargs:  # rope_utils:62 under context parallelism
            kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        return func(*args, **kwargs)


class _Device(str):
    """The CPU for torch, and formatted as 0 in Megatron-FSDP's "cuda:{current_device()}" (megatron_fsdp:184)."""

    def __format__(self, spec: str) -> str:
        return "0"


class _NullStream:
    """Replaces torch.cuda.Stream and Event: every method does nothing (token_dispatcher:445,871)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0.0 if name == "elapsed_time" else self


class _CpuMesh(DeviceMesh):
    """torch's DeviceMesh, always of CPUs."""

    @staticmethod
    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:  # noqa: ARG004
        return DeviceMesh.from_group(group, "cpu", *args, **kwargs)


def _patch_torch_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _Device("cpu")  # about 60 places: rope, linears, p2p, gradient buffers
    cuda.synchronize = lambda device=None: None  # p2p_communication:398 (every pipeline)
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.Stream = cuda.Event = _NullStream
    stream = _NullStream()
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.stream = lambda s: contextlib.nullcontext()


def _patch_megatron() -> None:
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter as fsdp
    import megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer as fsdp_buffers
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as mcore_random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    # Activation recomputation saves and restores the CUDA generator (random:55-112).
    mcore_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    mcore_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # moe_utils:1092 converts splits to numpy only if they are CUDA tensors; gloo's all-to-all needs numbers too.
    dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    # Megatron-FSDP makes meshes of CUDA devices (mcore_fsdp_adapter:229-268), to which it would move its shards.
    fsdp.DeviceMesh = _CpuMesh
    # It coalesces its all-gathers and waits for them later.  Under gloo this corrupts memory; the reason is unknown
    # (torch 2.13: a third of the runs of a tiny model ended in malloc's abort).  One by one they work; the gradients'
    # reductions are treated in the same way.
    fsdp_buffers._coalescing_manager = _one_by_one
    pipeline = fsdp_buffers.AllGatherPipeline
    pipeline.async_bucket_gather = _awaited(pipeline.async_bucket_gather)
    # gloo gathers and scatters only equal sizes; ranks that share experts have unequal numbers of tokens for them.
    mappings._gather_along_first_dim = _gather_unequal(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_unequal(mappings._reduce_scatter_along_first_dim)


@contextlib.contextmanager
def _one_by_one(group: Any, async_ops: bool = False) -> Iterator[Any]:  # noqa: ARG001
    """torch's _coalescing_manager without coalescing: at its end there is nothing to wait for."""
    yield _NullStream()


def _awaited(stock: Any) -> Any:
    """param_and_grad_buffer:3719, but the bucket is gathered when the call returns."""

    @functools.wraps(stock)
    def gather(self: Any, bucket_id: int, bwd: bool) -> None:
        stock(self, bucket_id, bwd)
        work, _ = self.param_gather_event_map[self.get_bucket_key(bucket_id, bwd)]
        work.wait()

    return gather


def _gather_unequal(stock: Any) -> Any:
    """mappings:114, but unequal numbers of rows are gathered by an all-to-all."""

    @functools.wraps(stock)
    def gather(x: Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if sizes is None or len(set(sizes)) == 1:
            return stock(x, group, sizes, use_global_buffer)
        out = x.new_empty(sum(sizes), *x.shape[1:])
        dist.all_to_all_single(out, torch.cat([x] * group.size()), sizes, [len(x)] * group.size(), group=group)
        return out

    return gather


def _reduce_scatter_unequal(stock: Any) -> Any:
    """mappings:155, but unequal numbers of rows are reduced by an all-to-all and a local sum."""

    @functools.wraps(stock)
    def reduce_scatter(x: Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if sizes is None or len(set(sizes)) == 1:
            return stock(x, group, sizes, use_global_buffer)
        own = sizes[group.rank()]
        parts = x.new_empty(group.size() * own, *x.shape[1:])
        dist.all_to_all_single(parts, x.contiguous(), [own] * group.size(), sizes, group=group)
        return parts.unflatten(0, (group.size(), own)).sum(0)

    return reduce_scatter


def import_megatron() -> None:
    """Import megatron.core without the parts that no CPU run uses; changes nothing if CUDA is available.

    At import it compiles fused functions, for which torch loads its compiler, and imports wandb for its inference
    engine: together more than half of a rank's start-up time.
    """
    if torch.cuda.is_available():
        return
    compiles = torch.compile
    torch.compile = lambda function=None, **_: (lambda same: same) if function is None else function  # type: ignore[assignment]
    hidden = "wandb" not in sys.modules
    if hidden:
        sys.modules["wandb"] = None  # type: ignore[assignment]  # importing it fails
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compiles
        if hidden:
            del sys.modules["wandb"]


def activate() -> None:
    """Prepare this process for Megatron on CPU; safe to call again; does nothing if CUDA is available."""
    global _active
    if _active or torch.cuda.is_available():
        return
    keep_freed_memory()
    _patch_torch_cuda()
    _CudaIsCpu().__enter__()  # for the life of this thread
    _patch_megatron()
    _active = True
