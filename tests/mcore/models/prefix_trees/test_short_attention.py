"""Attention by products of small matrices against torch's, in float64 and in 16 bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.mcore.models.prefix_trees import short_attention


def case() -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k and v of four heads to two, a mask by which each query sees something, and a gradient of the output."""
    g = torch.Generator().manual_seed(0)
    shapes = [(3, 4, 5, 8), (3, 2, 7, 8), (3, 2, 7, 6), (3, 4, 5, 6)]
    *inputs, up = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    mask = torch.rand(3, 1, 5, 7, generator=g) < 0.5
    mask[..., 2] = True
    return inputs, mask, up


def test_it_is_torchs_attention_and_so_are_its_gradients() -> None:
    inputs, mask, up = case()
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = F.scaled_dot_product_attention(*leaves, attn_mask=mask, scale=0.3, enable_gqa=True)
    out, sums = short_attention.attend(*inputs, mask, 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    scores = 0.3 * inputs[0] @ inputs[1].repeat_interleave(2, 1).mT
    torch.testing.assert_close(sums, scores.masked_fill(~mask, -torch.inf).logsumexp(-1), rtol=1e-12, atol=1e-12)
    ours = short_attention.attend_backward(up, out, sums, *inputs, mask, 0.3)
    for mine, theirs in zip(ours, torch.autograd.grad(expected, leaves, up), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_part_of_a_larger_softmax_has_its_share_of_the_gradient() -> None:
    """With the output and the sum of the whole, each half of the keys has the gradients that it has in the whole."""
    (q, k, v), _, up = case()
    everything = torch.ones(3, 1, 5, 7, dtype=torch.bool)
    whole = short_attention.attend(q, k, v, everything, 0.3)
    of_q, of_k, of_v = short_attention.attend_backward(up, *whole, q, k, v, everything, 0.3)
    halves = [
        short_attention.attend_backward(up, *whole, q, k[:, :, at], v[:, :, at], everything[..., at], 0.3)
        for at in (slice(0, 3), slice(3, 7))
    ]
    torch.testing.assert_close(halves[0][0] + halves[1][0], of_q)
    torch.testing.assert_close(torch.cat([half[1] for half in halves], 2), of_k)
    torch.testing.assert_close(torch.cat([half[2] for half in halves], 2), of_v)


def test_16_bits_are_computed_in_float32() -> None:
    inputs, mask, _ = case()
    rounded = [x.bfloat16() for x in inputs]
    out, sums = short_attention.attend(*rounded, mask, 0.3)
    assert out.dtype == sums.dtype == torch.float32
    torch.testing.assert_close(out.double(), short_attention.attend(*(x.double() for x in rounded), mask, 0.3)[0])
