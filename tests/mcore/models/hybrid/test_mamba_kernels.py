"""Mamba-2's scan in chunks equals the recurrence token by token, in value and gradient, whatever shares its row."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.mcore.models.hybrid.delta_kernels import CHUNK
from megarl.mcore.models.hybrid.mamba_kernels import mamba_split_conv1d_scan_combined, scan

HEADS, SIZE, GROUPS, STATE, TAPS = 4, 3, 2, 5, 3
INNER, WIDTH = HEADS * SIZE, HEADS * SIZE + 2 * GROUPS * STATE
LENGTHS = st.lists(st.sampled_from([1, 2, 7, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5]), min_size=1, max_size=5)


def token_by_token(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:  # noqa: N803
    """Of one sequence [T, H, ...]: the recurrence as its paper has it, the head of a group having the same B and C."""
    state, outs = x.new_zeros(HEADS, STATE, SIZE), []
    keys, queries = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (B, C))
    for t in range(len(x)):
        new = torch.einsum("h,hn,hp->hnp", dt[t], keys[t], x[t])
        state = (dt[t] * A).exp()[:, None, None] * state + new
        outs.append(torch.einsum("hnp,hn->hp", state, queries[t]))
    return torch.stack(outs)


def draw(total: int) -> list[Tensor]:
    torch.manual_seed(total)
    x, dt = torch.randn(total, HEADS, SIZE).double(), torch.rand(total, HEADS).double()
    B, C = (torch.randn(total, GROUPS, STATE).double() for _ in "BC")  # noqa: N806
    return [part.requires_grad_() for part in (x, dt, -3 * torch.rand(HEADS).double(), B, C)]


@settings(max_examples=25, deadline=None)
@given(LENGTHS)
def test_every_sequence_of_a_row_is_scanned_as_alone_and_token_by_token(lengths: list[int]) -> None:
    given_ = draw(sum(lengths))
    x, dt, A, B, C = given_  # noqa: N806
    out = scan(x, dt, A, B, C, torch.tensor([0, *lengths, 0]).cumsum(0))  # the last sequence is empty
    parts = zip(*(part.split(lengths) for part in (x, dt, B, C)), strict=True)
    alone = torch.cat([token_by_token(x_, dt_, A, B_, C_) for x_, dt_, B_, C_ in parts])
    torch.testing.assert_close(out, alone, rtol=1e-9, atol=1e-11)
    weights = torch.randn_like(out)
    got, wanted = (torch.autograd.grad((each * weights).sum(), given_) for each in (out, alone))
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


def mixed(row: Tensor, seq_idx: Tensor | None, weights: list[Tensor]) -> Tensor:
    taps, bias, dt_bias, A, D = weights  # noqa: N806
    return mamba_split_conv1d_scan_combined(
        row, taps, bias, dt_bias, A, D, headdim=SIZE, ngroups=GROUPS, seq_idx=seq_idx, norm_before_gate=False
    )


def weights_of(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = ((WIDTH, TAPS), (WIDTH,), (HEADS,), (HEADS,), (HEADS,))
    taps, bias, dt_bias, A_log, D = (torch.randn(shape).to(dtype) for shape in shapes)  # noqa: N806
    return [taps, bias, dt_bias, -A_log.exp(), D]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 9, CHUNK + 1]), min_size=1, max_size=4))
def test_a_sequence_is_mixed_as_alone_by_convolution_step_scan_skip_and_gate(lengths: list[int]) -> None:
    weights, total = weights_of(torch.float64), sum(lengths)
    row = torch.randn(1, total, INNER + WIDTH + HEADS).double()
    number = torch.repeat_interleave(torch.tensor(lengths))[None].int()
    out = mixed(row, number, weights)
    taps, bias, dt_bias, A, D = weights  # noqa: N806
    for own, found in zip(row[0].split(lengths), out[0].split(lengths), strict=True):
        z, xbc, dt = own.split((INNER, WIDTH, HEADS), -1)
        xbc = F.silu(F.conv1d(F.pad(xbc.T, (TAPS - 1, 0)), taps[:, None], bias, groups=WIDTH)).T
        x, B, C = xbc.split((INNER, GROUPS * STATE, GROUPS * STATE), -1)  # noqa: N806
        x = x.unflatten(-1, (HEADS, SIZE))
        B, C = (part.unflatten(-1, (GROUPS, STATE)) for part in (B, C))  # noqa: N806
        y = token_by_token(x, F.softplus(dt + dt_bias), A, B, C) + D[:, None] * x
        torch.testing.assert_close(found, y.flatten(1) * F.silu(z), rtol=1e-9, atol=1e-11)
    if len(lengths) == 1:
        assert torch.equal(out, mixed(row, None, weights))


def test_sixteen_bits_are_computed_in_float32() -> None:
    weights, row = weights_of(torch.bfloat16), torch.randn(1, 2 * CHUNK, INNER + WIDTH + HEADS).bfloat16()
    conv = [part.float() for part in weights[:2]]
    numbers = torch.tensor([0] * 100 + [1] * 28)[None].int()
    rounded, exact = (
        mixed(row, numbers, weights),
        mixed(row.float(), numbers, [*conv, *(w.float() for w in weights[2:])]),
    )
    assert rounded.dtype is torch.bfloat16
    # The convolution's output alone is rounded between them: 2^-9 of each number that enters the scan.
    assert (rounded.float() - exact).norm() < 2**-7 * exact.norm()
