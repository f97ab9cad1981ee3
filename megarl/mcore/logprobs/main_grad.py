"""Gradients of hidden states and weight from gradients of chunks of their logits.

A weight's gradient is added piece by piece, directly into Megatron's gradient buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor


class WeightGradient:
    """Adds products to `main_grad`, or to a tensor of its own if the weight has no permanent one."""

    def __init__(self, weight: Tensor, *, fused_accumulation: bool) -> None:
        """`fused_accumulation`: Megatron's setting to add to main_grad inside the matrix product (Apex's kernel)."""
        self.weight: Any = weight
        # Megatron-FSDP uses other memory for it in each micro-batch, and takes the gradient from autograd.
        main: Tensor | None = None if hasattr(weight, "__fsdp_param__") else getattr(weight, "main_grad", None)
        self.is_main, self.fused = main is not None, fused_accumulation and main is not None
        kind = torch.promote_types(weight.dtype, torch.float32)
        self.target = torch.zeros_like(weight, dtype=kind) if main is None else main

    def add(self, rows: slice, grad_logits: Tensor, hidden: Tensor) -> None:
        """target[rows] += grad_logits [T, rows]^T hidden [T, H]; at most one tensor [rows, H] in between."""
        target = self.target[rows]
        if self.fused and target.dtype is torch.float32:
            layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(hidden, grad_logits, target)
        elif self.fused:
            layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16(hidden, grad_logits, target)
        else:
            add_product_(target, grad_logits.T, hidden)

    def finish(self) -> Tensor | None:
        """The gradient for autograd, or None if main_grad has it already."""
        if not self.is_main:
            return self.target.to(self.weight.dtype)
        self.weight.grad_added_to_main_grad = True
        if not getattr(self.weight, "zero_out_wgrad", False):
            # DDP's hook runs next; when it overlaps reductions with the backward pass, it requires a gradient, which it
            # then discards.  (For weights tied on one stage, the embedding's own gradient arrives there.)
            self.weight.grad = self.weight.new_zeros(1, 1).expand_as(self.weight)
        return None


def add_product_(target: Tensor, left: Tensor, right: Tensor) -> None:
    """target += left @ right; target may have a wider dtype than the factors."""
    if target.dtype == left.dtype:
        target.addmm_(left, right)
    elif target.is_cuda and _adds_widely(left.dtype, target.dtype, target.device):
        torch.addmm(target, left, right, out_dtype=target.dtype, out=target)
    else:
        target += left @ right


@cache
def _adds_widely(narrow: torch.dtype, wide: torch.dtype, device: torch.device) -> bool:
    """Whether torch adds a product to a wider tensor in place here: without a product of its own, which is rounded."""
    one = torch.ones(16, 16, dtype=narrow, device=device)
    found = one.to(wide)
    try:
        torch.addmm(found, one, one, out_dtype=wide, out=found)
    except (RuntimeError, TypeError):  # an older torch, or no such kernel on this device
        return False
    return bool((found == 17).all())


class LogitGradients:
    """The gradients of hidden [T, H] and weight [V, H] through logits = hidden @ weight.T, in lots of some tokens."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, dtype: torch.dtype, *, learns_weight: bool, fused_accumulation: bool
    ) -> None:
        """`dtype`: in which the chunks of a lot are added up; `fused_accumulation`: see WeightGradient."""
        self.of_hidden = torch.zeros_like(hidden)
        self._weight, self._dtype = weight, dtype
        self._of_weight = WeightGradient(weight, fused_accumulation=fused_accumulation) if learns_weight else None

    @contextmanager
    def of_lot(self, at: Tensor, hidden: Tensor) -> Iterator[Callable[[slice, Tensor], None]]:
        """`hidden` [C, H] of the tokens `at` [C], which are in no other lot.

        Yields what adds a chunk: the rows of the weight, and the gradient of the logits [C, rows].
        """
        of_lot = torch.zeros_like(hidden, dtype=self._dtype)

        def add(rows: slice, grad_logits: Tensor) -> None:
            rounded = grad_logits.to(self._weight.dtype)
            add_product_(of_lot, rounded, self._weight[rows])
            if self._of_weight is not None:
                self._of_weight.add(rows, rounded, hidden)

        yield add
        self.of_hidden[at] = of_lot.to(self.of_hidden.dtype)

    def of_weight(self) -> Tensor | None:
        """When all lots are added: see WeightGradient.finish; None for a weight that does not learn."""
        return None if self._of_weight is None else self._of_weight.finish()
