"""The alignment of packed rows: labels shift left, outputs shift right, padding counts for nothing."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.arch.layout import Layout
from megarl.mcore.models.prefix_trees.flex_tree import FlexPlan
from megarl.mcore.training import packed_rows
from megarl.mcore.training.packed_rows import (
    PackedRow,
    Rows,
    in_one_block,
    in_whole_turns,
    make_row,
    micro_batches,
    own_positions,
    padded_lengths,
    where_gathered,
)
from megarl.samples.batch import Batch, MicroBatch

CPU = torch.device("cpu")
lengths_of_rows = st.lists(st.integers(1, 30), min_size=1, max_size=6)


def batch_of(lengths: list[int]) -> Batch:
    """Token i of the batch is 100 + i."""
    return Batch(100 + torch.arange(sum(lengths)), torch.tensor(lengths))


def rows_of_all_ranks(batch: Batch, layout: Layout, *, is_dummy: bool = False) -> list[PackedRow]:
    out = []
    for rank in range(layout.cp):
        with mock.patch.object(packed_rows.ps, "get_context_parallel_rank", return_value=rank):
            out.append(make_row(MicroBatch(batch, is_dummy=is_dummy), layout, CPU))
    return out


def column_over_ranks(all_rows: list[PackedRow], outputs: list[Tensor]) -> Tensor:
    """What `column` gives once the outputs of all context ranks are gathered."""
    with mock.patch.object(packed_rows, "gather_context", return_value=torch.cat(outputs)):
        columns = [row.column(out) for row, out in zip(all_rows, outputs, strict=True)]
    assert all(torch.equal(columns[0], column) for column in columns), "every context rank gets the same column"
    return columns[0]


def test_two_sequences_by_hand() -> None:
    """Sequences a b c and d e: the model predicts b, c and e, at the positions of a, b and d."""
    batch = Batch(torch.tensor([10, 11, 12, 20, 21]), torch.tensor([3, 2]))
    row = make_row(MicroBatch(batch), Layout(), CPU)
    assert row.tokens.tolist() == [[10, 11, 12, 20, 21]]
    assert row.positions.tolist() == [[0, 1, 2, 0, 1]]
    assert row.labels.tolist() == [11, 12, 0, 21, 0], "what follows a last token is asked of nobody"
    assert row.packed.cu_seqlens_q.tolist() == [0, 3, 5, 5, 5, 5, 5, 5, 5], "few numbers of sequences, with empty ones"
    assert row.packed.max_seqlen_q == 512, "few longest ones"
    assert row.num_own_tokens == 5
    # Output t is about token t+1; the first token of a sequence has no prediction, the last output no token.
    assert row.column(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).tolist() == [0, 1, 2, 0, 4]
    assert row.column(torch.arange(10.0).view(5, 2)).tolist() == [[0, 0], [0, 1], [2, 3], [0, 0], [6, 7]]


def test_an_mtp_layer_predicts_the_token_behind_the_next_one() -> None:
    """As above: the first layer predicts c, at the position of a, and the second one nothing."""
    batch = Batch(torch.tensor([10, 11, 12, 20, 21]), torch.tensor([3, 2]))
    row = make_row(MicroBatch(batch), Layout(), CPU, mtp=2)
    assert row.packed.labels.tolist() == [row.labels.tolist(), [12, 0, 0, 0, 0], [0] * 5]
    column = row.column(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert [row.later(column, places).tolist() for places in (1, 2)] == [[0, 0, 1, 0, 0], [0] * 5]


@given(st.lists(st.tuples(st.sampled_from(["uint8", "int32", "int64", "float32", "bool"]), st.integers(0, 9))))
def test_tensors_that_travel_in_one_block_arrive_as_they_were(drawn: list[tuple[str, int]]) -> None:
    tensors = [torch.arange(size).to(getattr(torch, dtype)).view(1, size) for dtype, size in drawn]
    for got, tensor in zip(in_one_block(tensors, CPU), tensors, strict=True):
        assert torch.equal(got, tensor) and got.dtype == tensor.dtype


def test_a_row_is_made_when_its_turn_comes_with_the_columns_of_its_loss() -> None:
    batch = batch_of([3, 2]).with_columns(weight=torch.ones(5), other=torch.ones(5))
    with mock.patch.object(packed_rows, "make_row", wraps=make_row) as made:
        rows = Rows([MicroBatch(batch)] * 3, Layout(), CPU, ["weight"])
        assert len(rows) == 3 and made.call_count == 0
        assert rows[1] is rows[1] and made.call_count == 1
    assert rows[1].columns.keys() == {"weight"}


def test_the_gradient_of_a_column_goes_to_the_output_that_made_it() -> None:
    row = make_row(MicroBatch(batch_of([3, 2])), Layout(), CPU)
    output = torch.zeros(5, requires_grad=True)
    row.column(output).backward(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert output.grad is not None
    assert output.grad.tolist() == [2, 3, 0, 5, 0]


@pytest.mark.parametrize(
    ("layout", "lengths", "padded"),
    [
        (Layout(tp=4), [3, 5, 1], [3, 5, 1]),
        (Layout(pp=2), [3, 5, 1], [3, 5, 1]),
        (Layout(cp=2), [3, 5], [4, 8]),  # each sequence to twice the context ranks
        (Layout(cp=2), [4, 8], [4, 8]),
        (Layout(cp=4), [1, 7], [8, 8]),
        (Layout(tp=2, sequence_parallel=True), [3, 5], [3, 5]),  # the row at its end
        (Layout(tp=2, sequence_parallel=True), [3, 4], [3, 5]),
        (Layout(tp=3, cp=2, sequence_parallel=True), [3, 5], [4, 8]),
    ],
)
def test_rows_are_padded_as_a_layout_wants(layout: Layout, lengths: list[int], padded: list[int]) -> None:
    assert padded_lengths(lengths, layout) == padded


@given(lengths_of_rows, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]), st.booleans())
def test_padded_rows_divide_as_the_layout_needs(lengths: list[int], tp: int, cp: int, sequence_parallel: bool) -> None:
    padded = padded_lengths(list(lengths), Layout(tp=tp, cp=cp, sequence_parallel=sequence_parallel))
    assert all(have >= expected for have, expected in zip(padded, lengths, strict=True))
    if cp > 1:
        assert all(length % (2 * cp) == 0 for length in padded)
    if sequence_parallel:
        assert sum(padded) % (tp * cp) == 0


@given(lengths_of_rows, st.sampled_from([1, 2, 3, 4]))
def test_context_ranks_share_a_row_without_gap_or_overlap(lengths: list[int], cp: int) -> None:
    padded = [2 * cp * length for length in lengths]
    starts = [sum(padded[:i]) for i in range(len(padded))]
    parts = [own_positions(starts, padded, cp, rank) for rank in range(cp)]
    assert len({len(part) for part in parts}) == 1, "every rank holds as much"
    held = torch.cat(parts)
    assert held.sort().values.tolist() == list(range(sum(padded)))
    everywhere = torch.arange(sum(padded))
    assert torch.equal(held[where_gathered(parts[0], everywhere, cp, starts, padded)], everywhere)


@given(lengths_of_rows, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.booleans())
def test_a_perfect_model_predicts_every_token_but_the_first(
    lengths: list[int], cp: int, tp: int, sequence_parallel: bool
) -> None:
    """A model that outputs its label: the column is the batch's own tokens, with 0 at each first one."""
    batch = batch_of(lengths)
    all_rows = rows_of_all_ranks(batch, Layout(tp=tp, cp=cp, sequence_parallel=sequence_parallel))
    expected = batch.tokens.clone()
    expected[batch.row_starts] = 0
    assert torch.equal(column_over_ranks(all_rows, [row.labels for row in all_rows]), expected)
    # The same with the tokens that the model sees: output t is about token t+1, so it saw token t.
    expected = torch.where(expected == 0, 0, expected - 1)
    assert torch.equal(column_over_ranks(all_rows, [row.tokens[0] for row in all_rows]), expected)
    assert sum(row.num_own_tokens for row in all_rows) == batch.num_tokens, "padding is counted nowhere"


def test_positions_count_from_each_sequences_start_on_every_rank() -> None:
    first, second = rows_of_all_ranks(batch_of([3, 7]), Layout(cp=2))
    assert first.positions.tolist() == [[0, 3, 0, 1, 6, 7]]
    assert second.positions.tolist() == [[1, 2, 2, 3, 4, 5]]
    assert first.tokens.tolist() == [[100, 0, 103, 104, 109, 0]], "0 where a sequence is padded"
    assert first.packed.cu_seqlens_q.tolist()[:3] == [0, 4, 12], "of the whole row, not of the slice"
    assert (first.num_own_tokens, second.num_own_tokens) == (4, 6)


@given(lengths_of_rows, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.booleans())
def test_a_column_that_nobody_knows_is_sliced_like_the_labels(
    lengths: list[int], cp: int, tp: int, sequence_parallel: bool
) -> None:
    """Numbers that the token tells, at the place that predicts it, on the one context rank that has it; 0 elsewhere."""
    batch = batch_of(lengths)
    routes = (batch.tokens[:, None, None] * torch.tensor([[1, 2, 3], [4, 5, 6]])).to(torch.uint16)
    all_rows = rows_of_all_ranks(batch, Layout(tp=tp, cp=cp, sequence_parallel=sequence_parallel))
    for row in all_rows:
        found = row.slice(routes)
        assert (found.dtype, found.shape) == (torch.uint16, (row.tokens.size(1), 2, 3))
        assert torch.equal(found[:, 0, 0].long(), row.labels)
        assert torch.equal(found.long(), row.labels[:, None, None] * torch.tensor([[1, 2, 3], [4, 5, 6]]))
        assert torch.equal(row.targets >= 0, row.labels > 0)
    tokens = torch.cat([row.slice(batch.tokens) for row in all_rows])
    firsts = set(batch.tokens[batch.row_starts].tolist())
    assert sorted(tokens[tokens > 0].tolist()) == [token for token in batch.tokens.tolist() if token not in firsts]


def test_columns_on_the_host_are_sliced_without_a_look_at_the_rows_device() -> None:
    """Nothing can be read from the device `meta`; of a GPU that would wait for all that it has to do."""
    micro = MicroBatch(batch_of([3, 2]))
    row = make_row(micro, Layout(), torch.device("meta"))
    assert row.tokens.is_meta
    assert torch.equal(row.slice(micro.batch.tokens), make_row(micro, Layout(), CPU).labels)


@pytest.mark.parametrize(("tp", "places"), [(1, 128), (2, 128), (3, 384)])
def test_a_row_that_shares_prefixes_on_a_gpu_is_whole_blocks_that_divide_over_sequence_parallel_ranks(
    tp: int, places: int
) -> None:
    layout = Layout(tp=tp, sequence_parallel=tp > 1)
    with mock.patch.dict(packed_rows.PLANS, cpu=FlexPlan):
        row = make_row(MicroBatch(batch_of([3, 2]), shares_prefixes=True), layout, CPU)
    assert row.tokens.shape == (1, places)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.uint16, torch.int32, torch.bfloat16, torch.float64])
def test_dummies_and_micro_batches_keep_dtype_and_shape(dtype: torch.dtype) -> None:
    batch = batch_of([2, 1, 3]).with_columns(some=torch.arange(24).view(6, 2, 2).to(dtype))
    made = in_whole_turns(micro_batches(batch, [2, 0, 1]), Layout(pp=2, vpp=2))
    assert [micro.is_dummy for micro in made] == [False, True, False, True]
    assert {(micro.batch.columns["some"].dtype, micro.batch.columns["some"].shape[1:]) for micro in made} == {
        (dtype, (2, 2))
    }
    assert torch.equal(made[2].batch.columns["some"], batch.columns["some"][3:])
    for row in rows_of_all_ranks(made[1].batch, Layout(cp=2), is_dummy=True):
        assert not row.slice(made[1].batch.columns["some"]).any()
        assert (row.num_own_tokens, row.tokens.shape) == (0, (1, 2)), "its tokens are not counted"


def test_micro_batches_take_sequences_in_order() -> None:
    batch = batch_of([2, 1, 3]).with_columns(weight=torch.arange(6.0))
    first, second, third = micro_batches(batch, [2, 0, 1])
    assert first.batch.tokens.tolist() == [100, 101, 102]
    assert first.batch.columns["weight"].tolist() == [0, 1, 2]
    assert (first.is_dummy, second.is_dummy, third.is_dummy) == (False, True, False)
    assert third.batch.lengths.tolist() == [3]
    assert third.batch.columns["weight"].tolist() == [3, 4, 5]
    dummies = micro_batches(batch.select([]), [0, 0])
    assert [micro.is_dummy for micro in dummies] == [True, True]
    assert list(dummies[0].batch.columns) == ["weight"]
    with pytest.raises(AssertionError, match="2 of 3 samples are packed"):
        micro_batches(batch, [2])


def test_interleaved_stages_run_turns_of_as_many_rows_as_there_are_pipeline_ranks() -> None:
    micros = [MicroBatch(batch_of([3, 2]))]
    assert in_whole_turns(micros * 5, Layout(pp=4)) == micros * 5
    found = in_whole_turns(micros * 5, Layout(pp=4, vpp=2))
    assert [micro.is_dummy for micro in found] == [False] * 5 + [True] * 3
    assert in_whole_turns(found, Layout(pp=4, vpp=2)) == found
