import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.weights.mapping.names import QKV, GateUp, Op, Piece, Rename, ValueHead, Vocab


def numbered(op: Op) -> dict[str, torch.Tensor]:
    """HF tensors whose elements are all different."""
    out, at = {}, 1
    for name, shape in op.hf_shapes.items():
        n = torch.Size(shape).numel()
        out[name] = torch.arange(at, at + n).reshape(shape)
        at += n
    return out


def round_trip(op: Op, tp_size: int) -> None:
    tensors = numbered(op)
    shards = [op.to_megatron(tensors, rank, tp_size) for rank in range(tp_size)]
    back = op.to_hf(shards)
    assert list(back) == list(tensors)
    for name in tensors:
        assert torch.equal(back[name], tensors[name])
        assert back[name].is_contiguous()


def test_qkv_interleaves_by_group() -> None:
    # 4 heads in 2 groups, head_dim 1, hidden 1: rows of q are 0 1 2 3, of k 10 11, of v 20 21.
    op = QKV("qkv", "q", "k", "v", 4, 2, 1, 1)
    tensors = {
        "q": torch.tensor([[0], [1], [2], [3]]),
        "k": torch.tensor([[10], [11]]),
        "v": torch.tensor([[20], [21]]),
    }
    assert op.to_megatron(tensors).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert op.to_megatron(tensors, 0, 2).flatten().tolist() == [0, 1, 10, 20]
    assert op.to_megatron(tensors, 1, 2).flatten().tolist() == [2, 3, 11, 21]


def test_qkv_keeps_the_rows_of_a_head_together() -> None:
    # 2 heads, 1 group, head_dim 2, bias.
    op = QKV("qkv", "q", "k", "v", 2, 1, 2, None)
    tensors = {"q": torch.tensor([0, 1, 2, 3]), "k": torch.tensor([10, 11]), "v": torch.tensor([20, 21])}
    assert op.to_megatron(tensors).tolist() == [0, 1, 2, 3, 10, 11, 20, 21]
    # Two ranks share the one group: a rank holds a run of rows, whatever they are.
    assert op.to_megatron(tensors, 1, 2).tolist() == [10, 11, 20, 21]
    assert op.pieces(1, 2) == [Piece("k", 0, 0, 0, 2), Piece("v", 0, 0, 2, 2)]


def test_gate_and_up_are_stacked_on_every_rank() -> None:
    op = GateUp("fc1", "gate", "up", 4, 1)
    tensors = {"gate": torch.tensor([[0], [1], [2], [3]]), "up": torch.tensor([[10], [11], [12], [13]])}
    assert op.to_megatron(tensors).flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert op.to_megatron(tensors, 0, 2).flatten().tolist() == [0, 1, 10, 11]
    assert op.to_megatron(tensors, 1, 2).flatten().tolist() == [2, 3, 12, 13]


def test_vocabulary_is_padded_with_zero_rows_at_the_end() -> None:
    op = Vocab("embedding", "embed_tokens", vocab_size=5, hidden=1, multiple=2)
    tensors = {"embed_tokens": torch.tensor([[1], [2], [3], [4], [5]])}
    assert op.to_megatron(tensors).flatten().tolist() == [1, 2, 3, 4, 5, 0]
    assert op.to_megatron(tensors, 0, 2).flatten().tolist() == [1, 2, 3, 4]
    assert op.to_megatron(tensors, 1, 2).flatten().tolist() == [5, 0, 0, 0]
    assert op.to_megatron(tensors, 3, 4).flatten().tolist() == [0, 0]  # nothing but padding
    assert op.pieces(3, 4) == []


def test_columns_are_cut_for_row_parallel_layers() -> None:
    op = Rename("fc2", "down", (2, 4), 1)
    tensors = {"down": torch.tensor([[0, 1, 2, 3], [10, 11, 12, 13]])}
    assert op.to_megatron(tensors, 1, 2).tolist() == [[2, 3], [12, 13]]
    assert op.shard_shape(2) == (2, 2)


def test_what_is_not_sharded_is_whole_on_every_rank_and_exported_from_one() -> None:
    for op in (Rename("norm", "norm", (3,)), ValueHead("output_layer.weight", "score.weight", (1, 3))):
        tensors = numbered(op)
        assert not op.is_sharded
        shard = op.to_megatron(tensors, 1, 2)
        assert torch.equal(shard, next(iter(tensors.values())))
        assert torch.equal(op.to_hf([shard])[op.hf_name], shard)


def test_export_of_an_unsharded_parameter_shares_its_memory() -> None:
    op = GateUp("fc1", "gate", "up", 2, 3)
    whole = op.to_megatron(numbered(op))
    out = op.to_hf([whole])
    assert out["up"].data_ptr() == whole[2:].data_ptr()


def test_a_size_that_does_not_divide_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"fc1: its size 5 does not divide by tensor_model_parallel_size=2"):
        GateUp("fc1", "gate", "up", 5, 1).shard_shape(2)


def test_layer_is_read_from_the_name() -> None:
    assert Rename("decoder.layers.12.input_layernorm.weight", "x", (1,)).layer == 12
    assert Rename("decoder.final_layernorm.weight", "x", (1,)).layer is None


@settings(deadline=None)
@given(
    per_group=st.integers(1, 4),
    groups=st.integers(1, 6),
    head_dim=st.sampled_from([1, 2, 4]),
    hidden=st.sampled_from([None, 1, 3]),
    tp_size=st.integers(1, 6),
)
def test_qkv_round_trip(per_group: int, groups: int, head_dim: int, hidden: int | None, tp_size: int) -> None:
    op = QKV("qkv", "q", "k", "v", per_group * groups, groups, head_dim, hidden)
    if (per_group + 2) * groups * head_dim % tp_size:
        with pytest.raises(ValueError, match="does not divide"):
            op.shard_shape(tp_size)
        return
    round_trip(op, tp_size)


@settings(deadline=None)
@given(vocab=st.integers(1, 50), multiple=st.integers(1, 8), hidden=st.integers(1, 3), tp_size=st.integers(1, 5))
def test_vocab_round_trip(vocab: int, multiple: int, hidden: int, tp_size: int) -> None:
    op = Vocab("embedding", "embed_tokens", vocab, hidden, multiple)
    assert op.shard_shape(tp_size)[0] % multiple == 0
    assert op.shard_shape(tp_size)[0] * tp_size >= vocab
    round_trip(op, tp_size)


@settings(deadline=None)
@given(n=st.integers(1, 4), m=st.integers(1, 4), tp_size=st.integers(1, 4), dim=st.sampled_from([None, 0, 1]))
def test_rename_and_gate_round_trip(n: int, m: int, tp_size: int, dim: int | None) -> None:
    shape = {None: (n, m), 0: (n * tp_size, m), 1: (n, m * tp_size)}[dim]
    op = Rename("a", "b", shape, dim)
    if dim is None:
        assert torch.equal(op.to_hf([op.to_megatron(numbered(op), tp_size - 1, tp_size)])["b"], numbered(op)["b"])
    else:
        round_trip(op, tp_size)
    round_trip(GateUp("fc1", "gate", "up", n * tp_size, m), tp_size)


@settings(deadline=None)
@given(tp_size=st.integers(1, 6), groups=st.integers(1, 4))
def test_pieces_of_all_ranks_cover_every_hf_row_once(tp_size: int, groups: int) -> None:
    for op in (
        QKV("qkv", "q", "k", "v", 3 * groups, groups, 12, 1),
        GateUp("f", "gate", "up", 60, 2),
        Vocab("e", "w", 37, 1, 4),
    ):
        if isinstance(op, QKV) and 60 * groups % tp_size:
            continue
        seen = {name: torch.zeros(shape[0], dtype=torch.int64) for name, shape in op.hf_shapes.items()}
        for rank in range(tp_size):
            for p in op.pieces(rank, tp_size):
                seen[p.hf_name][p.hf_start : p.hf_start + p.length] += 1
        assert all(bool((count == 1).all()) for count in seen.values())
