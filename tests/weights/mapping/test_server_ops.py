import pytest
import torch

from megarl.weights.mapping.names import ShardCoordinate
from megarl.weights.mapping.server_ops import StackedExperts, StackedQKV, StackedRows, StackedVocab


def rows(start, stop):
    return torch.arange(start, stop, dtype=torch.float32)[:, None]


def shard(op, whole, coordinate):
    out = torch.zeros(op.shape_at(coordinate))
    for piece in op.pieces_at(coordinate):
        piece.of_shard(out).copy_(piece.of_hf(whole[piece.hf_name]))
    return out


QKV_WHOLE = {"q": rows(0, 8), "k": rows(100, 102), "v": rows(200, 202)}


@pytest.mark.parametrize(
    ("tp", "rank", "expected"),
    [
        (1, 0, [*range(8), 100, 101, 200, 201]),
        (2, 1, [4, 5, 6, 7, 101, 201]),
        (4, 0, [0, 1, 100, 200]),
        (4, 1, [2, 3, 100, 200]),
        (4, 2, [4, 5, 101, 201]),
        (8, 7, [7, 101, 201]),
    ],
)
def test_a_rank_holds_its_query_heads_and_a_copy_of_their_key_value_head(tp, rank, expected):
    op = StackedQKV("qkv", "q", "k", "v", num_heads=8, num_groups=2, head_dim=1, hidden=1)
    assert shard(op, QKV_WHOLE, ShardCoordinate(rank, tp)).flatten().tolist() == expected


def test_a_bias_has_no_columns():
    op = StackedQKV("qkv", "q", "k", "v", 4, 2, 3, None)
    assert op.shard_shape(2) == ((2 + 1 + 1) * 3,)


def test_key_value_heads_that_do_not_fit_the_ranks_are_refused():
    op = StackedQKV("qkv", "q", "k", "v", 12, 4, 1, 1)
    with pytest.raises(ValueError, match="qkv: 4 key-value heads cannot be dealt to 6 ranks"):
        op.shard_shape(6)


@pytest.mark.parametrize(("is_cut", "expected"), [(True, [2, 3, 11]), (False, [0, 1, 2, 3, 10, 11])])
def test_parts_lie_over_one_another(is_cut, expected):
    op = StackedRows("both", (("a", 4), ("b", 2)), 1, is_cut)
    whole = {"a": rows(0, 4), "b": rows(10, 12)}
    assert shard(op, whole, ShardCoordinate(1, 2)).flatten().tolist() == expected
    assert op.hf_shapes == {"a": (4, 1), "b": (2, 1)}


def test_experts_of_a_rank_are_stacked_gate_over_up():
    op = StackedExperts("w13", ("e.{}.gate", "e.{}.up"), num_experts=4, shape=(4, 1), dim=0)
    whole = {f"e.{i}.{x}": rows(10 * i + n, 10 * i + n + 4) for i in range(4) for x, n in (("gate", 0), ("up", 100))}
    coordinate = ShardCoordinate(3, 4, ep_rank=1, ep=2, etp_rank=1, etp=2)
    assert shard(op, whole, coordinate).squeeze(-1).tolist() == [[22, 23, 122, 123], [32, 33, 132, 133]]
    assert op.shape_at(coordinate) == (2, 4, 1) and op.shard_shape(2) == (4, 4, 1)


def test_down_projections_are_cut_by_columns():
    op = StackedExperts("w2", ("e.{}.down",), num_experts=2, shape=(1, 4), dim=1)
    whole = {f"e.{i}.down": rows(10 * i, 10 * i + 4).T for i in range(2)}
    assert shard(op, whole, ShardCoordinate(0, 2, etp_rank=1, etp=2)).tolist() == [[[2, 3]], [[12, 13]]]
    with pytest.raises(ValueError, match="w2: 2 experts do not divide by ep_size=4"):
        op.shape_at(ShardCoordinate(ep=4))


@pytest.mark.parametrize(
    ("vocab", "tp", "expected"),
    [(151936, 1, 151936), (151936, 4, 37984), (100, 3, 64), (100, 2, 64), (130, 2, 96), (37, 8, 8)],
)
def test_a_vocabulary_is_padded_as_sglang_does(vocab, tp, expected):
    op = StackedVocab("embed", "embed", vocab, 1)
    assert op.shard_shape(tp) == (expected, 1)
    held = [(piece.hf_start, piece.length) for rank in range(tp) for piece in op.pieces(rank, tp)]
    assert sum(length for _, length in held) == vocab
    assert held[0][0] == 0 and all(start == expected * i for i, (start, _) in enumerate(held))
