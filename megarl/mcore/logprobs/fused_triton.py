"""Statistics and gradient of a chunk of logits as Triton kernels: each logit is read once (in backward, also written).

The functions are those of `fused_torch.py`.  Arithmetic is in float32 for any dtype of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.mcore.logprobs import token_statistics as ts

BLOCK, NUM_WARPS = 4096, 8  # logits of one row that a program holds at a time, and its warps
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
MAX, SUM, LABEL, X_SUM = (tl.constexpr(row) for row in (ts.MAX, ts.SUM, ts.LABEL, ts.X_SUM))
SQUARES, REF_MAX, REF_SUM, DIFF = (tl.constexpr(row) for row in (ts.SQUARES, ts.REF_MAX, ts.REF_SUM, ts.DIFF))
OF_LABEL, OF_P, OF_LOG_P = (tl.constexpr(row) for row in (ts.OF_LABEL, ts.OF_P, ts.OF_LOG_P))
OF_P_SQUARED, OF_LOG_RATIO = (tl.constexpr(row) for row in (ts.OF_P_SQUARED, ts.OF_LOG_RATIO))
LOG_Z, REF_LOG_Z = (tl.constexpr(row) for row in (ts.LOG_Z, ts.REF_LOG_Z))


def statistics(
    logits: Tensor, ref_logits: Tensor | None, index: Tensor, num_real: int, temperature: float, names: Sequence[str]
) -> Tensor:
    """Like `fused_torch.statistics`."""
    found = ts.empty_statistics(len(logits), logits)
    _statistics_kernel[(len(logits),)](
        logits,
        logits if ref_logits is None else ref_logits,
        index,
        found,
        len(logits),
        logits.size(1),
        num_real,
        1.0 / temperature,
        with_entropy="entropy" in names,
        with_squares="sum_pi_squared" in names,
        with_reference=ref_logits is not None,
        block=BLOCK,
        num_warps=NUM_WARPS,
    )
    return found


def gradient_(
    logits: Tensor, ref_logits: Tensor | None, index: Tensor, factors: Tensor, num_real: int, temperature: float
) -> None:
    """Like `fused_torch.gradient_`."""
    _gradient_kernel[(len(logits), triton.cdiv(logits.size(1), BLOCK))](
        logits,
        logits if ref_logits is None else ref_logits,
        index,
        factors.contiguous(),
        len(logits),
        logits.size(1),
        num_real,
        1.0 / temperature,
        with_reference=ref_logits is not None,
        block=BLOCK,
        num_warps=NUM_WARPS,
    )


@triton.jit
def _statistics_kernel(
    logits,
    ref_logits,
    index,
    found,
    num_rows,
    width,
    num_real,
    inverse_temperature,
    with_entropy: tl.constexpr,
    with_squares: tl.constexpr,
    with_reference: tl.constexpr,
    block: tl.constexpr,
):
    """One program for each row: the running sums are relative to the largest logit so far."""
    row = tl.program_id(0).to(tl.int64)
    largest = LOWEST
    ref_largest = LOWEST
    total = 0.0
    x_sum = 0.0
    squares = 0.0
    ref_total = 0.0
    diff = 0.0
    for first in range(0, num_real, block):
        column = first + tl.arange(0, block)
        is_real = column < num_real
        z = tl.load(logits + row * width + column, mask=is_real, other=float("-inf"))
        z = z.to(tl.float32) * inverse_temperature
        now = tl.maximum(largest, tl.max(z, 0))
        down = largest - now
        scale = tl.exp(down)
        x = z - now
        e = tl.exp(x)
        if with_reference:
            z = tl.load(ref_logits + row * width + column, mask=is_real, other=float("-inf"))
            z = z.to(tl.float32) * inverse_temperature
            ref_now = tl.maximum(ref_largest, tl.max(z, 0))
            ref_down = ref_largest - ref_now
            y = z - ref_now
            diff = scale * (diff + (down - ref_down) * total) + tl.sum(tl.where(is_real, e * (x - y), 0.0), 0)
            ref_total = tl.exp(ref_down) * ref_total + tl.sum(tl.exp(y), 0)
            ref_largest = ref_now
        if with_entropy:
            x_sum = scale * (x_sum + down * total) + tl.sum(tl.where(is_real, e * x, 0.0), 0)
        if with_squares:
            squares = scale * scale * squares + tl.sum(e * e, 0)
        total = scale * total + tl.sum(e, 0)
        largest = now
    own = tl.load(index + row)
    label = tl.load(logits + row * width + own, mask=own >= 0, other=0.0).to(tl.float32) * inverse_temperature
    tl.store(found + MAX * num_rows + row, largest)
    tl.store(found + SUM * num_rows + row, total)
    tl.store(found + LABEL * num_rows + row, label)
    tl.store(found + X_SUM * num_rows + row, x_sum)
    tl.store(found + SQUARES * num_rows + row, squares)
    tl.store(found + REF_MAX * num_rows + row, ref_largest)
    tl.store(found + REF_SUM * num_rows + row, ref_total)
    tl.store(found + DIFF * num_rows + row, diff)


@triton.jit
def _gradient_kernel(
    logits,
    ref_logits,
    index,
    factors,
    num_rows,
    width,
    num_real,
    inverse_temperature,
    with_reference: tl.constexpr,
    block: tl.constexpr,
):
    """One program for each block of a row: reads the block and overwrites it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    is_real = column < num_real
    z = tl.load(logits + row * width + column, mask=is_real, other=0.0).to(tl.float32)
    log_p = z * inverse_temperature - tl.load(factors + LOG_Z * num_rows + row)
    p = tl.exp(log_p)
    inner = tl.load(factors + OF_P * num_rows + row) + tl.load(factors + OF_LOG_P * num_rows + row) * log_p
    inner += tl.load(factors + OF_P_SQUARED * num_rows + row) * p
    if with_reference:
        z = tl.load(ref_logits + row * width + column, mask=is_real, other=0.0).to(tl.float32)
        log_q = z * inverse_temperature - tl.load(factors + REF_LOG_Z * num_rows + row)
        inner += tl.load(factors + OF_LOG_RATIO * num_rows + row) * (log_p - log_q)
    is_label = column == tl.load(index + row)
    grad = p * inner + tl.where(is_label, tl.load(factors + OF_LABEL * num_rows + row), 0.0)
    grad = tl.where(is_real, grad * inverse_temperature, 0.0)
    tl.store(logits + row * width + column, grad.to(logits.dtype.element_ty), mask=column < width)
