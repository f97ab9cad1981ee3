"""Norms and the gate of Megatron's local layers: one node of autograd each, where torch has a chain of operations.

Around small products the elementwise operations of a layer take as long as the products do.  Those of a chain read and
write the whole row again and again, and keep what lies between them for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CACHED_ELEMENTS = 2**18  # in blocks of so many, what lies between two operations of a chain is in a CPU core's cache


class Norm:
    """RMSNorm or LayerNorm, marked so that Megatron sums its gradient over sequence-parallel ranks."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:  # noqa: ARG003
        kind = {"RMSNorm": RMSNorm, "LayerNorm": nn.LayerNorm}[config.normalization]
        norm = ZeroCentredNorm(hidden_size, eps) if config.layernorm_zero_centered_gamma else kind(hidden_size, eps=eps)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[union-attr]
        return norm


class RMSNorm(nn.RMSNorm):
    """torch's; on CPUs its backward pass is one fused kernel and a product, in place of thirteen operations."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same."""
        return _Rms.apply(x, self.weight, self.eps) if x.is_cpu else super().forward(x)


class ZeroCentredNorm(nn.Module):
    """RMS norm times 1 + weight.  The parameter is the weight as the folder has it: 1 + it in bfloat16 loses bits."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same."""
        return F.rms_norm(_wide(x), (x.size(-1),), 1 + _wide(self.weight), self.eps).to(x.dtype)


class _Rms(torch.autograd.Function):
    """y = x r w with r = (mean(x^2) + eps)^(-1/2), and so dx = r w dy - x r^3 sum(w dy x) / n.

    16-bit numbers are computed in float32, as torch does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # without a tensor of squares
        scale = norms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """By torch's fused kernel of LayerNorm, for a mean of 0; without what that mean would take from dx."""
        given, weight, scale = ctx.saved_tensors
        x, grad, wide, size = _wide(given), _wide(grad), _wide(weight), given.shape[-1]
        of_x, of_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, [size], torch.zeros_like(scale), scale, wide, None, [True, True, False]
        )
        of_mean = (grad.reshape(-1, size) @ wide).view(scale.shape).mul_(scale).div_(size)
        return of_x.add_(of_mean).to(given.dtype), of_weight.to(weight.dtype), None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Gate(nn.Module):
    """silu(gate) * up.  Keeps its input alone for the backward pass, as Megatron's fused kernel for GPUs does."""

    def __init__(self, config: Any = None) -> None:  # noqa: ARG002
        """`config`: as Megatron passes it."""
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """[..., gate and up] -> [..., half of it]."""
        return _Gate.apply(x)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Its part of a checkpoint, for which Megatron asks each module of a feed-forward: none."""
        return {}


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        of_x, width = x.new_empty(x.shape), x.size(-1)
        flat, of_flat, of_outs = x.reshape(-1, width), of_x.view(-1, width), grad.reshape(-1, width // 2)
        rows = max(1, CACHED_ELEMENTS // width if x.is_cpu else len(flat))
        for block, of_block, of_out in zip(flat.split(rows), of_flat.split(rows), of_outs.split(rows), strict=True):
            (gate, up), (of_gate, of_up) = block.chunk(2, dim=-1), of_block.chunk(2, dim=-1)
            torch.mul(of_out, F.silu(gate), out=of_up)
            torch.ops.aten.silu_backward.grad_input(of_out * up, gate, grad_input=of_gate)
        return of_x
