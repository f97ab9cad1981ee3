"""Packed attention against one sequence at a time, and the pad plan that makes it fast."""

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from attention_cases import KINDS, errors
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.mcore.models import attention as attention_module
from megarl.mcore.models.attention import PackedParams, SDPAttention, pad_plan

HEADS, DIM = 4, 8


def core_of(window: int | None = None, layer: int = 1, **how: Any) -> SDPAttention:
    """The core attention of a layer; with a window a token sees itself and the window - 1 before it."""
    sizes = {"num_layers": 2, "hidden_size": HEADS * DIM, "num_attention_heads": HEADS, "attention_dropout": 0.0}
    size = None if window is None else (window - 1, 0)
    config = TransformerConfig(**sizes | {"window_size": size, "window_attn_skip_freq": [1, 0]} | how)
    return SDPAttention(config, layer, AttnMaskType.causal, "self")


@pytest.fixture
def attention() -> SDPAttention:
    return core_of()


def slow_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int = 10**6, sinks: Tensor | None = None
) -> Tensor:
    """The definition, one sequence, head and token after the other, in float64: [t, n, d] -> [t, n * d]."""
    repeat = q.size(1) // k.size(1)
    k, v = (x.double().repeat_interleave(repeat, 1) for x in (k, v))
    out, start = torch.zeros(q.shape, dtype=torch.float64), 0
    for length in lengths:
        for head in range(q.size(1)):
            for t in range(start, start + length):
                seen = slice(max(start, t + 1 - window), t + 1)
                scores = k[seen, head] @ q[t, head].double() / math.sqrt(q.size(2))
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                out[t, head] = scores.softmax(0)[: t + 1 - seen.start] @ v[seen, head]
        start += length
    return out.flatten(1)


ROWS = [[5], [3, 17, 1, 4, 16]]


@pytest.mark.parametrize("lengths", ROWS)
@pytest.mark.parametrize(
    ("window", "kv_heads", "has_sinks"),
    [(None, HEADS, True), (None, 2, True), (3, 2, True), (1, 2, False), (3, 2, False), (16, 2, False)],
)
def test_a_window_hides_what_lies_further_back_and_a_sink_takes_its_part_of_the_softmax(
    window: int | None, kv_heads: int, has_sinks: bool, lengths: list[int]
) -> None:
    """Of layers without a window there is every second.  Sinks get their gradient."""
    assert core_of(window, layer=2).window is None
    core = core_of(window, softmax_type="learnable" if has_sinks else "vanilla")
    qkv = random_qkv(sum(lengths), kv_heads, seed=3)
    sinks = [torch.nn.init.normal_(core.softmax_offset)] if has_sinks else []
    up = torch.randn(sum(lengths), HEADS * DIM, generator=torch.Generator().manual_seed(4))
    expected = slow_attention(*qkv, lengths, window or 10**6, *sinks)
    got = core(*qkv, packed_seq_params=packed_row(lengths))
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)
    ours = torch.autograd.grad((got * up).sum(), [*qkv, *sinks])
    theirs = torch.autograd.grad((expected * up).sum(), [*qkv, *sinks])
    for gradient, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-4, rtol=0)
    if len(lengths) == 1:
        batched = core(*(x[:, None] for x in qkv))[:, 0]
        torch.testing.assert_close(batched.double(), expected, atol=1e-5, rtol=0)


def random_qkv(num_tokens: int, kv_heads: int, seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(num_tokens, n, DIM, generator=g).requires_grad_() for n in (HEADS, kv_heads, kv_heads)]


def packed_row(lengths: list[int], *, with_plan: bool = True) -> PackedParams:
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest, pad = max(lengths), pad_plan(lengths) if with_plan else None
    return PackedParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest, pad=pad)


@pytest.mark.parametrize("lengths", [[5], [1, 1], [3, 17, 1, 4, 16], [2, 40, 3]])
@pytest.mark.parametrize(("with_plan", "kv_heads"), [(True, HEADS), (True, 2), (False, 1)])
def test_packed_sequences_do_not_see_each_other(
    attention: SDPAttention, with_plan: bool, kv_heads: int, lengths: list[int]
) -> None:
    qkv = random_qkv(sum(lengths), kv_heads, seed=len(lengths))
    got = attention(*qkv, packed_seq_params=packed_row(lengths, with_plan=with_plan))
    expected = slow_attention(*qkv, lengths)
    assert got.shape == (sum(lengths), HEADS * DIM)
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=0)
    factor = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    fast, slow = torch.autograd.grad((got * factor).sum(), qkv), torch.autograd.grad((expected * factor).sum(), qkv)
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=1e-5)


def test_dense_batches_are_causal_too(attention: SDPAttention) -> None:
    """sbhd: [s, b, n, d] -> [s, b, n * d]; two sequences of 6."""
    flat = random_qkv(12, 2, seed=7)
    dense = [x.unflatten(0, (2, 6)).transpose(0, 1) for x in flat]
    got = attention(*dense)
    assert got.shape == (6, 2, HEADS * DIM)
    expected = slow_attention(*flat, [6, 6])
    torch.testing.assert_close(got.transpose(0, 1).flatten(0, 1).double(), expected, atol=2e-6, rtol=0)


def test_what_it_cannot_do_is_an_error(attention: SDPAttention) -> None:
    q, k, v = random_qkv(3, HEADS, 0)
    with pytest.raises(AssertionError, match="attention bias"):
        attention(q, k, v, attention_bias=torch.zeros(1), packed_seq_params=packed_row([3]))
    with pytest.raises(AssertionError, match="decoders only"):
        SDPAttention(attention.config, 1, AttnMaskType.padding, "self")
    with pytest.raises(AssertionError, match="dropout is 0"):
        SDPAttention(attention.config, 1, AttnMaskType.causal, "self", attention_dropout=0.1)


def test_sequences_of_like_length_share_one_call() -> None:
    plan = pad_plan([2, 40, 3])
    assert (plan.buckets, plan.num_slots) == (((2, 3), (1, 40)), 46)
    assert plan.slots.tolist() == [0, 1, *range(6, 46), 3, 4, 5]
    assert pad_plan([10] * 7).buckets == ((7, 10),)
    assert [pad_plan(lengths).in_place for lengths in ([10] * 7, [2, 2, 40], [2, 40, 3], [9, 10])] == [1, 1, 0, 0]
    assert pad_plan([100, 138, 139]).buckets == ((2, 138), (1, 139)), "138 = 1.3 * 100 + 8"
    assert pad_plan([100, 138, 139], waste=2.0).buckets == ((3, 139),)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=30), st.sampled_from([1.0, 1.3, 2.0]))
def test_a_pad_plan_gives_each_token_a_slot_and_wastes_little(lengths: list[int], waste: float) -> None:
    plan = pad_plan(lengths, waste)
    slots = plan.slots.tolist()
    assert len(slots) == sum(lengths)
    assert len(set(slots)) == len(slots)
    assert max(slots) < plan.num_slots
    assert plan.num_slots <= sum(waste * length + 8 for length in lengths)
    assert sorted(lengths)[-1] == max(length for _, length in plan.buckets)
    room = [length for count, length in plan.buckets for _ in range(count)]
    rows = dict(zip(accumulate(room, initial=0), room, strict=False))  # first slot of a row of a bucket -> its length
    used = set()
    for part in torch.tensor(slots).split(lengths):
        first = int(part[0])
        assert len(part) <= rows[first], "a sequence begins where a row of its bucket does"
        assert part.tolist() == list(range(first, first + len(part)))
        used.add(first)
    assert len(used) == len(lengths), "no two sequences share a row"


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_tests_of_long_rows_compare_agrees_on_short_ones(kind: str) -> None:
    heads = replace(KINDS[kind], window=16 if KINDS[kind].window else None)
    found = errors(SDPAttention, heads, [70, 1, 40], torch.float32, torch.device("cpu"))
    assert sorted(found) == ["key", "output", "query", "value"]
    assert max(found.values()) < 1e-5, found


class OnGpu(Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("device", "masked", "pairs"), [("cpu", False, 2), ("cpu", True, 2), ("cuda", False, 2), ("cuda", True, 4)]
)
def test_heads_are_repeated_where_no_fused_kernel_takes_fewer(
    attention: SDPAttention, monkeypatch: pytest.MonkeyPatch, device: str, masked: bool, pairs: int
) -> None:
    """The memory-efficient kernel, the one with masks on every GPU, has no grouped queries."""
    found: dict[str, object] = {}

    def kernel(q: Tensor, k: Tensor, v: Tensor, **how: object) -> Tensor:
        found.update(how, heads=(q.size(1), k.size(1), v.size(1)))
        return q

    monkeypatch.setattr(attention_module.F, "scaled_dot_product_attention", kernel)
    kind = OnGpu if device == "cuda" else Tensor
    q, k, v = (torch.empty(1, heads, 6, DIM).as_subclass(kind) for heads in (4, 2, 2))
    attention._sdpa(q, k, v, torch.ones(6, 6, dtype=torch.bool) if masked else None)
    assert found["heads"] == (4, pairs, pairs)
    assert found["enable_gqa"] is (pairs == 2)
    assert found["is_causal"] is not masked
