"""A plug-in of SGLang for machines without an accelerator: makes SGLang wait for no device where there is none.

`/weights_checker` synchronises with CUDA before it reads a clock, in some versions without asking whether it is there.
Adapters are kept in page-locked memory, which torch cannot make without an accelerator: ordinary memory does.
Multi-latent attention (DeepSeek) has no way of its own registered for plain torch, and would take Triton's.
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
        _attend_to_latents()


def _attend_to_latents() -> None:
    """Have plain torch attend to the cached latents themselves, also in prefill: it reads nothing but the cache."""
    package = "sglang.srt.models.deepseek_common"
    registry = import_module(f"{package}.attention_backend_handler").AttentionBackendRegistry
    latent = import_module(f"{package}.attention_forward_methods").AttnForwardMethod.MLA
    registry.register("torch_native", lambda attention, batch: latent)


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
