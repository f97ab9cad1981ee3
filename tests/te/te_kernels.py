"""What Transformer-Engine's compiled extension computes, in plain torch: products, norms, rope, optimizers.

Each function has the name and the arguments of one of `transformer_engine_torch` (2.20.2).  What the tests do not reach
(float8, overlapped communication, gelu inside a product) is refused by an assert.
"""

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class DType(enum.IntEnum):
    """The extension's numbers of types: Python's own `DType` of Transformer-Engine has the same."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


_TORCH = {4: torch.float32, 5: torch.float16, 6: torch.bfloat16}


def _times(left: Tensor, right: Tensor, *, left_turned: bool, right_turned: bool) -> Tensor:
    """right @ left of matrices in row order, either of them turned; in float32.  This is BLAS' left @ right."""
    left, right = (x.reshape(-1, x.shape[-1]).float() for x in (left, right))
    return (right.T if right_turned else right) @ (left.T if left_turned else left)


def generic_gemm(
    A: Tensor,
    transa: bool,
    B: Tensor,
    transb: bool,
    D: Tensor | None,
    quantizer: Any,
    out_dtype: int | None,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    *rest: Any,
    comm_overlap: Any = None,
    alpha: float = 1.0,
    **_: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """The product, and the bias' gradient if `grad`.  Of `rest`: workspace, its size, accumulate, split accumulator."""
    assert quantizer is None and not gelu and comm_overlap is None and alpha == 1.0, "not in the stand-in"
    accumulate = rest[2]
    product = _times(A, B, left_turned=transa, right_turned=transb)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = B.reshape(-1, B.shape[-1]).float().sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias.float()
    if D is None:
        shape = product.shape if transb else (*B.shape[:-1], product.shape[-1])
        return (
            product.to(_TORCH[int(out_dtype)] if out_dtype is not None else A.dtype).view(shape),
            bias_grad,
            None,
            None,
        )
    _put(D.view(product.shape), product, accumulate)
    return D, bias_grad, None, None


def _put(out: Tensor, product: Tensor, accumulate: bool) -> None:
    if accumulate:
        out += product.to(out.dtype)
    else:
        out.copy_(product)


def te_general_grouped_gemm(
    A: Sequence[Tensor],
    transa: bool,
    B: Sequence[Tensor],
    transb: bool,
    D: Sequence[Tensor],
    out_dtype: Any,
    m_splits: Sequence[int],
    bias: Sequence[Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu: Any,
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    *_: Any,
) -> Sequence[Tensor]:
    """One product for each expert; with `single_output` their rows are beside each other in D[0]."""
    outs = D[0].view(-1, D[0].shape[-1]).split(list(m_splits)) if single_output else D
    for i, (left, right, out) in enumerate(zip(A, B, outs, strict=True)):
        has_bias = bool(bias) and bias[i].numel() > 0
        if out.numel():
            product = _times(left, right, left_turned=transa, right_turned=transb)
            _put(out.view(product.shape), product + bias[i].float() if has_bias and not grad else product, accumulate)
        if has_bias and grad:
            bias[i].copy_(right.reshape(-1, bias[i].numel()).float().sum(0))
    return bias


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, dtype: int, margin: int, zero_centered: bool
) -> tuple[Tensor, None, Tensor]:
    """[n, h] -> the same, normed, and 1 / root mean square of each row."""
    assert out is None and quantizer is None and not zero_centered, "not in the stand-in"
    factor = torch.rsqrt(x.float().square().mean(-1) + eps)
    return (x.float() * factor[:, None] * weight.float()).to(_TORCH[int(dtype)]), None, factor


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, factor: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """With y = x f w and f = (mean(x^2) + eps)^-1/2: dx = f (g w) - x f^3 mean(x g w), dw = sum(g x f)."""
    through, wide, f = grad.float() * weight.float(), x.float(), factor[:, None]
    dx = f * through - wide * f**3 * (wide * through).mean(-1, keepdim=True)
    return dx.to(x.dtype), (grad.float() * wide * f).sum(0).to(weight.dtype)


def _own_angles(t: Tensor, angles: Tensor, ends: Tensor, cp: int, rank: int) -> Tensor:
    """[longest, 1, 1, d] -> [tokens, 1, d]: of each token of a packed row, of which context ranks have two chunks."""
    parts = []
    for length in ends.diff().tolist():
        chunk = length // (2 * cp)
        firsts = (rank * chunk, (2 * cp - 1 - rank) * chunk) if cp > 1 else (0,)
        parts += [angles[first : first + (chunk if cp > 1 else length)] for first in firsts]
    return torch.cat(parts)[: len(t), 0]


def _rotated(t: Tensor, angles: Tensor, sign: float) -> Tensor:
    turned, rest = t[..., : angles.shape[-1]].float(), t[..., angles.shape[-1] :]
    first, second = turned.chunk(2, -1)
    out = turned * angles.cos() + sign * torch.cat((-second, first), -1) * angles.sin()
    return torch.cat((out.to(t.dtype), rest), -1)


def fused_rope_forward(
    t: Tensor, angles: Tensor, starts: Any, layout: Any, interleaved: bool, ends: Tensor, cp: int, rank: int
) -> Tensor:
    assert starts is None and not interleaved and ends is not None, "not in the stand-in"
    return _rotated(t, _own_angles(t, angles, ends, cp, rank), 1.0)


def fused_rope_backward(
    grad: Tensor, angles: Tensor, starts: Any, layout: Any, interleaved: bool, ends: Tensor, cp: int, rank: int
) -> Tensor:
    return _rotated(grad, _own_angles(grad, angles, ends, cp, rank), -1.0)


def multi_tensor_scale(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_l2norm(
    chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    norms = torch.stack([x.float().norm() for x in lists[0]])
    return norms.norm().view(1), norms if per_tensor else torch.zeros(1)


def multi_tensor_adam(
    chunk: int,
    overflow: Tensor,
    lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    assert mode == 1 and bias_correction, "AdamW"
    for grad, param, mean, square in zip(*lists, strict=True):
        wide = grad.float()
        mean.lerp_(wide, 1 - beta1)
        square.mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
        update = (mean / (1 - beta1**step)) / ((square / (1 - beta2**step)).sqrt() + eps)
        param.sub_(lr * (update + weight_decay * param))


def multi_tensor_sgd(
    chunk: int,
    overflow: Tensor,
    lists: Sequence[Sequence[Tensor]],
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    is_first: bool,
    decays_after: bool,
    scale: float,
) -> None:
    assert not nesterov and not decays_after, "not in the stand-in"
    for grad, param, mean in zip(*lists[:3], strict=True):
        update = grad.float() * scale + weight_decay * param
        if momentum:
            mean.copy_(update if is_first else momentum * mean + (1 - dampening) * update)
            update = mean
        param.sub_(lr * update)


KERNELS = (
    generic_gemm,
    te_general_grouped_gemm,
    rmsnorm_fwd,
    rmsnorm_bwd,
    fused_rope_forward,
    fused_rope_backward,
    multi_tensor_scale,
    multi_tensor_l2norm,
    multi_tensor_adam,
    multi_tensor_sgd,
)
