"""Attention over prefix trees against one masked softmax, and that of small matrices against torch's, in float64."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flex_cases import reference, sees, tree_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.data.prefix_tree import PrefixTree
from megarl.mcore.models.prefix_trees import tree_attention
from megarl.mcore.models.prefix_trees.tree_attention import TreeAttention, TreePlan

ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=10)


@dataclass(frozen=True)
class Case:
    """Random attention over a tree of random rows, with places of padding behind them."""

    rows: list[list[int]]
    sizes: tuple[int, int, int, int]
    window: int | None
    has_sinks: bool
    padding: int
    seed: int

    def drawn(self) -> tuple[PrefixTree, list[Tensor], Tensor | None, Tensor]:
        """(tree, [q, k, v], sinks, a gradient of the output), float64."""
        tree, g = tree_of(self.rows), torch.Generator().manual_seed(self.seed)
        heads, of_keys, wide, of_values = self.sizes
        places = tree.num_places + self.padding
        shapes = [(places, heads, wide), (places, of_keys, wide), (places, of_keys, of_values)]
        inputs = [torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]
        sinks = torch.randn(heads, generator=g, dtype=torch.float64).requires_grad_() if self.has_sinks else None
        return tree, inputs, sinks, torch.randn(places, heads, of_values, generator=g, dtype=torch.float64)

    def check(self, got: Tensor, ours: Sequence[Tensor], drawn: tuple[Any, ...]) -> None:
        """The output and the gradients of q, k, v and sinks are those of one masked softmax."""
        tree, inputs, sinks, up = drawn
        n, leaves = tree.num_places, [*inputs, *([sinks] if sinks is not None else [])]
        expected = reference(*(x[:n] for x in inputs), sinks, sees(tree, self.window), 0.3)
        torch.testing.assert_close(got[:n], expected, rtol=1e-10, atol=1e-10)
        assert not got[n:].any()
        for mine, slow in zip(ours, torch.autograd.grad(expected, leaves, up[:n]), strict=True):
            torch.testing.assert_close(mine, slow, rtol=1e-10, atol=1e-10)


WINDOWS = st.none() | st.integers(1, 9)
CASES = st.builds(
    Case,
    rows=ROWS,
    sizes=st.sampled_from([(2, 2, 8, 8), (4, 2, 8, 8), (4, 1, 6, 4), (2, 2, 4, 6)]),  # heads of q, of k; of k, of v
    window=WINDOWS,
    has_sinks=st.booleans(),
    padding=st.integers(0, 2),
    seed=st.integers(0, 99),
)


@given(
    CASES,
    st.sampled_from([0, 4, tree_attention.REPEATED]),
    st.sampled_from([0, 40, tree_attention.FEW_SCORES]),
)
def test_it_is_one_masked_softmax_and_so_are_its_gradients(case: Case, repeated: int, few_scores: int) -> None:
    drawn = tree, inputs, sinks, up = case.drawn()
    with mock.patch.multiple(tree_attention, REPEATED=repeated, FEW_SCORES=few_scores):
        got = TreeAttention.apply(*inputs, sinks, TreePlan.of(tree, torch.device("cpu")), case.window, 0.3)
        leaves = [*inputs, *([sinks] if sinks is not None else [])]
        ours = torch.autograd.grad(got[: tree.num_places], leaves, up[: tree.num_places])
    case.check(got, ours, drawn)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_other_types_are_as_near_as_their_rounding(dtype: torch.dtype, close: float) -> None:
    g = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 9, (40,), generator=g).tolist()
    tree = tree_of([[*prompt, *torch.randint(0, 9, (n,), generator=g).tolist()] for n in (30, 3, 17, 60)])
    exact = [torch.randn(tree.num_places, n, 16, generator=g, dtype=torch.float64) for n in (4, 2, 2)]
    got = TreeAttention.apply(*(x.to(dtype) for x in exact), None, TreePlan.of(tree, torch.device("cpu")), None, 0.25)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), reference(*exact, None, sees(tree, None), 0.25), rtol=close, atol=close)


def test_parts_of_similar_size_share_a_call() -> None:
    g = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 1000, (n,), generator=g).tolist() for n in (20, 21, 300)]
    rows = [[*prompt, *torch.randint(0, 1000, (30,), generator=g).tolist()] for prompt in prompts for _ in range(4)]
    with mock.patch.object(tree_attention, "REPEATED", 0):
        calls = TreePlan.of(tree_of(rows), torch.device("cpu")).calls
    assert [call.shape for call in calls if call.is_causal] == [(12, 31, 31), (1, 300, 300)]
    assert [call.shape for call in calls if not call.is_causal] == [(2, 21, 21), (2, 124, 20), (1, 124, 299)]
    calls = TreePlan.of(tree_of(rows), torch.device("cpu")).calls
    assert [call.shape for call in calls if call.is_causal] == [(4, 31, 31), (1, 300, 300)]
    assert [call.shape for call in calls if not call.is_causal] == [(2, 21, 21), (8, 31, 51), (1, 124, 299)]


@given(sizes=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 200)), max_size=30))
def test_no_part_of_a_call_is_much_larger_than_another(sizes: list[tuple[int, int]]) -> None:
    parts = [(np.arange(queries), np.arange(keys)) for queries, keys in sizes]
    calls = list(tree_attention._calls(parts, np.append(np.arange(200), -1), is_causal=False, is_first=True))
    found = []
    for call in calls:
        of_call = [(positions >= 0).sum(1) for positions in (call.query_positions, call.key_positions)]
        assert all(counts.max() <= tree_attention.WASTE * counts.min() + 8 for counts in of_call)
        found += list(zip(*(counts.tolist() for counts in of_call), strict=True))
    assert sorted(found) == sorted((queries, keys) for queries, keys in sizes if keys)


def of_small_matrices() -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k and v of four heads to two, a mask by which each query sees something, and a gradient of the output."""
    g = torch.Generator().manual_seed(0)
    shapes = [(3, 4, 5, 8), (3, 2, 7, 8), (3, 2, 7, 6), (3, 4, 5, 6)]
    *inputs, up = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    mask = torch.rand(3, 1, 5, 7, generator=g) < 0.5
    mask[..., 2] = True
    return inputs, mask, up


def test_short_attention_is_torchs_and_so_are_its_gradients() -> None:
    inputs, mask, up = of_small_matrices()
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = F.scaled_dot_product_attention(*leaves, attn_mask=mask, scale=0.3, enable_gqa=True)
    out, sums = tree_attention.attend_short(*inputs, mask, 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    scores = 0.3 * inputs[0] @ inputs[1].repeat_interleave(2, 1).mT
    torch.testing.assert_close(sums, scores.masked_fill(~mask, -torch.inf).logsumexp(-1), rtol=1e-12, atol=1e-12)
    ours = tree_attention.attend_short_backward(up, out, sums, *inputs, mask, 0.3)
    for mine, theirs in zip(ours, torch.autograd.grad(expected, leaves, up), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_of_short_attention_a_part_of_a_larger_softmax_has_its_share_of_the_gradient() -> None:
    """With the output and the sum of the whole, each half of the keys has the gradients that it has in the whole."""
    (q, k, v), _, up = of_small_matrices()
    everything = torch.ones(3, 1, 5, 7, dtype=torch.bool)
    whole = tree_attention.attend_short(q, k, v, everything, 0.3)
    of_q, of_k, of_v = tree_attention.attend_short_backward(up, *whole, q, k, v, everything, 0.3)
    halves = [
        tree_attention.attend_short_backward(up, *whole, q, k[:, :, at], v[:, :, at], everything[..., at], 0.3)
        for at in (slice(0, 3), slice(3, 7))
    ]
    torch.testing.assert_close(halves[0][0] + halves[1][0], of_q)
    torch.testing.assert_close(torch.cat([half[1] for half in halves], 2), of_k)
    torch.testing.assert_close(torch.cat([half[2] for half in halves], 2), of_v)


def test_16_bits_of_short_attention_are_computed_in_float32() -> None:
    inputs, mask, _ = of_small_matrices()
    rounded = [x.bfloat16() for x in inputs]
    out, sums = tree_attention.attend_short(*rounded, mask, 0.3)
    assert out.dtype == sums.dtype == torch.float32
    torch.testing.assert_close(out.double(), tree_attention.attend_short(*(x.double() for x in rounded), mask, 0.3)[0])
