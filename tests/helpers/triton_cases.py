"""A program, because Triton's environment counts from its first import; prints JSON.

With TRITON_INTERPRET=1: the kernels of fused_triton.py against torch's operations, {case: {what: largest difference}}.
Without: the kernels compiled for an H100, which takes no GPU, {kernel: bytes of machine code}.
"""

import itertools
import json
import math
import os
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import interpreter

from megarl.mcore.logprobs import fused_torch, fused_triton
from megarl.mcore.logprobs import token_statistics as ts

# Triton's interpreter before 3.7 makes an index of int(array of one entry), which NumPy 2.4 refuses.
if os.environ.get("TRITON_INTERPRET") == "1" and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patched

NAMES = ("log_probs", "entropy", "sum_pi_squared", "full_kl")


def largest(one: Tensor, other: Tensor) -> float:
    """Relative to the entry, where that is more than 1."""
    return float(((one - other).abs() / other.abs().clamp(min=1)).max())


def compare(
    dtype: torch.dtype, num_real: int, width: int, with_reference: bool, temperature: float, device: str = "cpu"
) -> dict[str, float]:
    """Statistics, and the gradient written over the logits; a label at each end and one elsewhere."""
    g = torch.Generator().manual_seed(width)
    sides = [(4 * torch.randn(6, width, generator=g)).to(device, dtype) for _ in range(2)]
    logits, ref_logits = sides[0], sides[1] if with_reference else None
    index = torch.tensor([0, num_real - 1, -1, 2, 3, 1], device=device)
    how = (num_real, temperature)
    expected = fused_torch.statistics(logits, ref_logits, index, *how, NAMES)
    got = fused_triton.statistics(logits, ref_logits, index, *how, NAMES)
    grads = {name: torch.randn(6, generator=g).to(device) for name in (NAMES if with_reference else NAMES[:3])}
    factors = ts.factors_of(expected, grads)
    plain, own = logits.clone(), logits.clone()
    fused_torch.gradient_(plain, ref_logits, index, factors, *how)
    fused_triton.gradient_(own, ref_logits, index, factors, *how)
    return {
        "statistics": largest(got, expected),
        "gradient": largest(own.float(), plain.float()),
        "padding": float(own[:, num_real:].abs().sum()),
    }


def not_finite(bad: float, device: str = "cpu") -> dict[str, float]:
    """1 for each token whose log-prob is finite: the second alone holds the bad logit, in its last block."""
    logits = torch.zeros(3, 24, device=device)
    logits[1, 21] = bad
    found = fused_triton.statistics(logits, None, torch.zeros(3, dtype=torch.int64, device=device), 24, 1.0, NAMES)
    entropy = ts.columns_of(found)["entropy"]
    return {str(i): float(value) for i, value in enumerate(entropy.isfinite())}


def few_columns_alone(device: str = "cpu") -> dict[str, float]:
    """Sums that nobody asked for stay 0."""
    found = fused_triton.statistics(
        torch.randn(2, 8, device=device), None, torch.tensor([1, 2], device=device), 8, 1.0, ("log_probs",)
    )
    return {"unwanted": float(found[[ts.X_SUM, ts.SQUARES, ts.REF_SUM, ts.DIFF]].abs().sum())}


def all_cases(device: str = "cpu") -> dict[str, dict[str, float]]:
    shapes = [(40, 40), (37, 40), (16, 24), (5, 8)]
    out = {
        f"{str(dtype).removeprefix('torch.')} {num_real}/{width} reference={ref} temperature={t}": compare(
            dtype, num_real, width, ref, t, device
        )
        for dtype, (num_real, width), (ref, t) in itertools.product(
            (torch.float32, torch.bfloat16), shapes, ((False, 1.0), (True, 0.7))
        )
    }
    out |= {f"not finite {bad}": not_finite(bad, device) for bad in (math.nan, math.inf)}
    return out | {"few": few_columns_alone(device)}


def compiled(kernel: Any, element: str, **constants: bool) -> int:
    """Bytes of machine code of a kernel for logits of this type."""
    kinds = {"logits": f"*{element}", "ref_logits": f"*{element}", "index": "*i64", "inverse_temperature": "fp32"}
    kinds |= {"found": "*fp32", "factors": "*fp32"} | dict.fromkeys(("num_rows", "width", "num_real"), "i32")
    constexprs = {"block": fused_triton.BLOCK, **constants}
    signature = {name: "constexpr" if name in constexprs else kinds[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": fused_triton.NUM_WARPS})
    return len(built.asm["cubin"])


def all_compiled() -> dict[str, int]:
    out = {}
    for element, reference in itertools.product(("fp32", "bf16"), (False, True)):
        every = {"with_entropy": True, "with_squares": True, "with_reference": reference}
        out[f"statistics {element} {reference}"] = compiled(fused_triton._statistics_kernel, element, **every)
        out[f"gradient {element} {reference}"] = compiled(
            fused_triton._gradient_kernel, element, with_reference=reference
        )
    return out


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        fused_triton.BLOCK = 16  # several blocks in a row
        print(json.dumps(all_cases()))
    else:
        print(json.dumps(all_compiled()))
