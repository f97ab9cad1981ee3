"""Reads MXFP4 (OCP Microscaling Formats v1.0): blocks of 32 numbers of 4 bits with one power of two."""

from __future__ import annotations

import torch
from torch import Tensor

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1; the highest of the four bits is the sign
_NUMBERS = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)])
_BIAS = 127  # of a block's exponent (E8M0)


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """[.., blocks, 16] bytes of two numbers each, the lower bits first, and [.., blocks] exponents -> [.., numbers].

    bfloat16 holds every such number exactly.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - _BIAS
    return torch.ldexp(_NUMBERS[codes.int()], exponents[..., None]).flatten(-2).bfloat16()
