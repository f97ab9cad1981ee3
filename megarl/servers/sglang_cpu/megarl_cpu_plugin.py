"""A plug-in of SGLang for machines without an accelerator: replaces calls that need CUDA, pinned memory or Triton.

Some versions of `/weights_checker` synchronise with CUDA without a check whether it is available.
SGLang keeps adapters in pinned memory, which torch cannot allocate without an accelerator; here it is pageable memory.
So is the memory in which it keeps the experts of tokens, which it would pin by a call of CUDA's runtime.
Multi-latent attention (DeepSeek) has no handler registered for `torch_native`, and would use Triton's.
With attention data parallelism batches are padded; `torch_native` has no length for rows of padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor


def setup() -> None:
    """Called by SGLang in each of its processes."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = _nothing_to_wait_for
        torch.Tensor.pin_memory = _as_it_is  # type: ignore[assignment,method-assign]
        for name in ("tensor", "empty", "zeros"):
            setattr(torch, name, _ordinary(getattr(torch, name)))
        _allocate_for_routes()
        _attend_to_latents()
        _attend_to_padding()


def _allocate_for_routes() -> None:
    """Let SGLang's table of allocators have one for the CPU: a plain torch.empty."""
    common = import_module("sglang.srt.mem_cache.pool_host.common")
    common.ALLOC_MEMORY_FUNCS["cpu"] = common.alloc_with_pin_memory


def _attend_to_latents() -> None:
    """Let torch_native use the absorbed form of MLA, also in prefill: it attends only to the cached latents."""
    package = "sglang.srt.models.deepseek_common"
    registry = import_module(f"{package}.attention_backend_handler").AttentionBackendRegistry
    latent = import_module(f"{package}.attention_forward_methods").AttnForwardMethod.MLA
    registry.register("torch_native", lambda attention, batch: latent)


def _attend_to_padding() -> None:
    """Let torch_native give rows of padding a length of 1, as SGLang's other attention on a CPU does."""
    backend = import_module("sglang.srt.layers.attention.torch_native_backend").TorchNativeAttnBackend
    backend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def _nothing_to_wait_for(device: object = None) -> None:
    """In place of torch.cuda.synchronize."""


def _as_it_is(tensor: Tensor, device: object = None) -> Tensor:
    """In place of Tensor.pin_memory."""
    return tensor


def _ordinary(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`make` without its option pin_memory."""

    @functools.wraps(make)
    def make_ordinary(*args: object, pin_memory: bool = False, **options: object) -> Tensor:  # noqa: ARG001
        return make(*args, **options)

    return make_ordinary
