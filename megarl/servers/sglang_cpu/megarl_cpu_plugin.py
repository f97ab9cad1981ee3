"""A plug-in of SGLang for machines without an accelerator: replaces calls that need CUDA, pinned memory or Triton.

Some versions of `/weights_checker` synchronise with CUDA without a check whether it is available.
SGLang keeps adapters in pinned memory, which torch cannot allocate without an accelerator; here it is pageable memory.
So is the memory in which it keeps the experts of tokens, which it would pin by a call of CUDA's runtime.
Multi-latent attention (DeepSeek) has no handler registered for `torch_native`, and would use Triton's.
MiniMax-M2's norms over all heads are Triton's on processors without AMX.
With attention data parallelism batches are padded; `torch_native` has no length for rows of padding.
Gated delta nets (Qwen3-Next, Qwen3.5) have kernels for AMX and for GPUs only; `sgl_kernel.mamba` has them in torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

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
        _normalise_over_heads()
        _compute_gated_delta_nets()


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


def _normalise_over_heads() -> None:
    """Let MiniMax-M2 normalise queries and keys by plain torch."""
    models = import_module("sglang.srt.models.minimax_m2")
    models.MiniMaxM2QKRMSNorm._forward_naive = functools.partialmethod(_normalised, models.attn_tp_all_reduce)


def _normalised(norms: Any, reduce: Callable[[Tensor], Tensor], q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """[tokens, own heads * head_dim] each; the squares are those of the heads of all ranks."""
    squares = torch.stack([x.float().square().mean(-1) for x in (q, k)])
    if norms._world_size > 1:
        squares = reduce(squares) / norms._world_size
    scales = torch.rsqrt(squares + norms._eps)[..., None]
    weights = (norms._q_norm.weight, norms._k_norm.weight)
    return tuple((x.float() * s * w).to(x.dtype) for x, s, w in zip((q, k), scales, weights, strict=True))


def _compute_gated_delta_nets() -> None:
    """Let their layers, and the gate of the shared expert beside them, use plain torch."""
    import_module("sgl_kernel.mamba")  # torch.ops.sgl_kernel has its functions then
    package = "sglang.kernels.ops"
    norms: list[Any] = [import_module(f"{package}.attention.fla.{x}") for x in ("fused_norm_gate", "layernorm_gated")]
    for norm in norms:
        norm._use_cpu = True
    elementwise: Any = import_module(f"{package}.elementwise.elementwise")
    elementwise.fused_gate_sigmoid_mul_add = _add_gated


def _add_gated(hidden: Tensor, gate: Tensor, shared: Tensor, out: Tensor) -> None:
    """The shared expert's output [tokens, H] is scaled by its gate [H] and added to that of the others."""
    out += shared * (hidden.float() @ gate.float()).sigmoid()[:, None].to(shared.dtype)


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
