"""FlexAttention over prefix trees: its mask against ancestors, and its numbers and gradients in float64.

On CPUs torch's own definition of FlexAttention computes them, by the calls that make one kernel on GPUs.
"""

from collections.abc import Iterator

import pytest
import torch
from flex_cases import KINDS, answers, counted, errors, on_cpus, sees, tree_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree_attention import CASES, ROWS, WINDOWS, Case
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from megarl.mcore.models.prefix_trees import flex_tree
from megarl.mcore.models.prefix_trees.flex_tree import FlexPlan

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def without_a_gpu() -> Iterator[None]:
    with on_cpus():
        yield


def dense(mask: BlockMask) -> Tensor:
    return create_mask(mask.mask_mod, None, None, *mask.seq_lengths, device="cpu")[0, 0]


@given(rows=ROWS, window=WINDOWS, padding=st.integers(0, 9))
def test_a_place_sees_its_node_and_the_ancestors_but_their_last_places(
    rows: list[list[int]], window: int | None, padding: int
) -> None:
    tree = tree_of(rows)
    found = dense(FlexPlan.of(tree, CPU).mask(tree.num_places + padding, window))
    assert torch.equal(found[: tree.num_places, : tree.num_places], sees(tree, window))
    assert not found[tree.num_places :].any()
    assert not found[:, tree.num_places :].any()


def test_an_example() -> None:
    """Nodes "abcd", "dx" and "dyz", then "z" alone, and two places of padding."""
    tree = tree_of([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [8]])
    assert tree.lengths.tolist() == [4, 2, 3, 1]
    assert flex_tree.seen_until(tree).tolist() == [9, 9, 9, 4, 6, 6, 9, 9, 9, 10]


@given(rows=ROWS, window=WINDOWS, padding=st.integers(0, 9))
def test_blocks_that_are_left_out_are_not_seen_and_those_that_are_not_masked_are_seen_whole(
    rows: list[list[int]], window: int | None, padding: int
) -> None:
    tree, size = tree_of(rows), 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_tree, "BLOCK", size)
        mask = FlexPlan.of(tree, CPU).mask(tree.num_places + padding, window)
    exact = create_block_mask(mask.mask_mod, None, None, *mask.seq_lengths, device="cpu", BLOCK_SIZE=size)
    read, needed = mask.to_dense().bool(), exact.to_dense().bool()
    whole, could_be = (of_whole(each) for each in (mask, exact))
    assert not (needed & ~read).any()
    assert not (whole & ~could_be).any()
    if window is None:
        assert torch.equal(read, needed)
        assert torch.equal(whole, could_be)
    backwards = BlockMask.from_kv_blocks(mask.q_num_blocks, mask.q_indices, BLOCK_SIZE=size).to_dense().bool()
    assert torch.equal(backwards.mT, read & ~whole)


def of_whole(mask: BlockMask) -> Tensor:
    assert mask.full_kv_num_blocks is not None
    return BlockMask.from_kv_blocks(mask.full_kv_num_blocks, mask.full_kv_indices).to_dense().bool()


def check(case: Case) -> None:
    drawn = tree, inputs, sinks, up = case.drawn()
    got = FlexPlan.of(tree, CPU).attend(*inputs, sinks, case.window, 0.3)
    leaves = [*inputs, *([sinks] if sinks is not None else [])]
    case.check(got, torch.autograd.grad(got, leaves, up), drawn)  # of padding a gradient goes nowhere


@pytest.mark.full
@settings(max_examples=20)
@given(CASES)
def test_it_is_one_masked_softmax_and_so_are_its_gradients(case: Case) -> None:
    check(case)


def test_heads_wide_enough_for_the_kernel_are_not_padded() -> None:
    """Of latent attention keys are wider than values."""
    check(Case([[1, 2, 3, 4], [1, 2, 3, 5, 6]], (2, 1, 24, 16), None, True, 3, 5))


# Kinds of which the properties above have smaller ones show no more on CPUs.
@pytest.mark.parametrize(
    "kind", [kind if KINDS[kind].has_sinks else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS]
)
def test_parts_of_one_tensor_in_rows_of_several_blocks(kind: str) -> None:
    """What tests/gpu runs by the kernels."""
    found = errors(KINDS[kind], answers(150, [90, 8, 120]), torch.float32, CPU)
    assert max(found.values()) < 1e-5, found


def test_a_sink_takes_all_of_a_place_whose_scores_are_far_below() -> None:
    q, k, v = (torch.ones(3, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks = torch.full((1,), 2000.0, dtype=torch.float64, requires_grad=True)
    out = FlexPlan.of(tree_of([[1, 2, 3]]), CPU).attend(q, k, v, sinks, None, 0.5)
    assert not any(x.any() for x in (out, *torch.autograd.grad(out.sum(), (q, k, v, sinks))))


@pytest.mark.full
def test_rows_of_other_lengths_and_windows_compile_nothing_new() -> None:
    """Blocks: two and more, since torch compiles anew for sizes of 1; window or none; gradients or none."""
    counter = CompileCounterWithBackend("aot_eager")
    g = torch.Generator().manual_seed(3)

    def attend(prompt: int, answers: list[int], window: int | None, *, learns: bool) -> int:
        begin = torch.randint(0, 9, (prompt,), generator=g).tolist()
        tree = tree_of([[*begin, *torch.randint(0, 9, (n,), generator=g).tolist()] for n in answers])
        plan = FlexPlan.of(tree, CPU)
        places = -(-tree.num_places // plan.UNIT) * plan.UNIT
        assert places >= 2 * plan.UNIT
        q, k, v = (torch.randn(places, n, 16, generator=g, requires_grad=learns) for n in (4, 2, 2))
        out = plan.attend(q, k, v, None, window, 0.25)
        if learns:
            out.sum().backward()
        return counter.frame_count

    with counted(counter):
        first = [attend(100, [90, 80], w, learns=x) for w in (None, 7) for x in (True, False)][-1]
        for prompt, answers, window, learns in (
            *((300, [90, 8], None, True), (200, [30] * 9, 7, True), (60, [100] * 2, 12, False)),
            *((900, [300], None, False), (130, [2, 90, 90], 12, True)),
        ):
            assert attend(prompt, answers, window, learns=learns) == first
