"""The gated delta rule in chunks equals the rule token by token, in value and gradient, whatever shares its row."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.mcore.models.hybrid.delta_kernels import CHUNK, causal_conv1d, chunk_gated_delta_rule, l2norm

HEADS, KEY, VALUE = 2, 4, 3
LENGTHS = st.lists(st.sampled_from([1, 2, 7, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5]), min_size=1, max_size=5)


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Of one sequence [T, H, ...]: the rule as its paper has it."""
    state, outs = q.new_zeros(HEADS, KEY, VALUE), []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("h,hk,hv->hkv", beta[t], k[t], error)
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * KEY**-0.5)
    return torch.stack(outs)


def draw(total: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(total)
    q, k = (l2norm(torch.randn(1, total, HEADS, KEY, dtype=dtype)) for _ in "qk")
    v = torch.randn(1, total, HEADS, VALUE, dtype=dtype)
    g, beta = -3 * torch.rand(1, total, HEADS, dtype=dtype), torch.rand(1, total, HEADS, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def ends_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@settings(max_examples=25, deadline=None)
@given(LENGTHS)
def test_every_sequence_of_a_row_is_computed_as_alone_and_token_by_token(lengths: list[int]) -> None:
    ends, given_ = ends_of(lengths), draw(sum(lengths))
    q, k, v, g, beta = given_
    out, _ = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, cu_seqlens=ends)
    alone = [token_by_token(*(x[0, a:z] for x in given_)) for a, z in zip(ends[:-1], ends[1:], strict=True)]
    torch.testing.assert_close(out[0], torch.cat(alone), rtol=1e-9, atol=1e-11)
    weights = torch.randn_like(out)
    got = torch.autograd.grad((out * weights).sum(), given_)
    wanted = torch.autograd.grad((torch.cat(alone) * weights[0]).sum(), given_)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(1, 4))
def test_the_convolution_of_a_sequence_sees_no_other(lengths: list[int], width: int) -> None:
    ends, x, weight = ends_of(lengths), torch.randn(1, sum(lengths), 3).double(), torch.randn(3, width).double()
    out, _ = causal_conv1d(x, weight, activation="silu", cu_seqlens=ends)
    for a, z in zip(ends[:-1], ends[1:], strict=True):
        alone = F.conv1d(F.pad(x[0, a:z].T, (width - 1, 0)), weight[:, None], groups=3)
        torch.testing.assert_close(out[0, a:z], F.silu(alone).T, rtol=1e-12, atol=1e-12)


def test_sixteen_bits_are_computed_in_float32() -> None:
    given_ = draw(3 * CHUNK, torch.float32)
    ends = ends_of([100, 92])
    rounded = [x.detach().bfloat16() for x in given_]

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, cu_seqlens=ends)[0]

    assert torch.equal(rule(*rounded), rule(*(x.float() for x in rounded)).bfloat16())


def test_what_the_functions_do_not_have_is_refused() -> None:
    with pytest.raises(AssertionError, match="output_final_state"):
        causal_conv1d(torch.zeros(1, 2, 1), torch.zeros(1, 1), activation="silu", output_final_state=True)
