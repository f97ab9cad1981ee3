"""Attention over prefix trees against one masked softmax, forwards and backwards, in float64."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from flex_cases import reference, sees, tree_of
from hypothesis import given
from hypothesis import strategies as st

from megarl.mcore.models.prefix_trees import tree_attention
from megarl.mcore.models.prefix_trees.tree_attention import TreeAttention, TreePlan

ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=10)
SIZES = st.sampled_from([(2, 2, 8, 8), (4, 2, 8, 8), (4, 1, 6, 4), (2, 2, 4, 6)])  # heads of q, of k; sizes of k, of v


@given(
    rows=ROWS,
    sizes=SIZES,
    window=st.none() | st.integers(1, 9),
    has_sinks=st.booleans(),
    padding=st.integers(0, 2),
    repeated=st.sampled_from([0, 4, tree_attention.REPEATED]),
    few_scores=st.sampled_from([0, 40, tree_attention.FEW_SCORES]),
    seed=st.integers(0, 99),
)
def test_it_is_one_masked_softmax_and_so_are_its_gradients(
    rows: list[list[int]],
    sizes: tuple[int, int, int, int],
    window: int | None,
    has_sinks: bool,  # noqa: FBT001
    padding: int,
    repeated: int,
    few_scores: int,
    seed: int,
) -> None:
    tree, g = tree_of(rows), torch.Generator().manual_seed(seed)
    heads, of_keys, wide, of_values = sizes
    places = tree.num_places + padding
    shapes = [(places, heads, wide), (places, of_keys, wide), (places, of_keys, of_values)]
    inputs = [torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]
    sinks = torch.randn(heads, generator=g, dtype=torch.float64).requires_grad_() if has_sinks else None
    leaves = [*inputs, *([sinks] if sinks is not None else [])]

    up = torch.randn(tree.num_places, heads, of_values, generator=g, dtype=torch.float64)
    with mock.patch.multiple(tree_attention, REPEATED=repeated, FEW_SCORES=few_scores):
        plan = TreePlan.of(tree, torch.device("cpu"))
        got = TreeAttention.apply(*inputs, sinks, plan, window, 0.3)
        ours = torch.autograd.grad(got[: tree.num_places], leaves, up)
    used = [x[: tree.num_places] for x in inputs]
    expected = reference(*used, sinks, sees(tree, window), 0.3)
    torch.testing.assert_close(got[: tree.num_places], expected, rtol=1e-10, atol=1e-10)
    assert not got[tree.num_places :].any()

    theirs = torch.autograd.grad(expected, leaves, up)
    for mine, slow in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, slow, rtol=1e-10, atol=1e-10)


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


def test_a_short_part_is_not_padded_to_a_much_longer_one_that_sees_as_much() -> None:
    """Answers of 100 to a prompt of 20 see 120, those of 21 to a prompt of 100 see 121: each with a place more."""
    prompts = (range(20), range(100, 200))
    rows = [
        [*prompt, 200 + i, *range(300, 299 + answer)]
        for prompt, answer in zip(prompts, (100, 21), strict=True)
        for i in range(2)
    ]
    calls = TreePlan.of(tree_of(rows), torch.device("cpu")).calls
    assert [call.shape for call in calls if not call.is_causal] == [(1, 20, 20), (2, 101, 120), (2, 22, 121)]


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
