import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shards import to_megatron

from megarl.weights.mapping.names import QKV, ByHeads, GatedQKV, GateUp, HeadRows, Op, Piece, Rename, ValueHead, Vocab


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
    shards = [to_megatron(op, tensors, rank, tp_size) for rank in range(tp_size)]
    back = op.to_hf(shards)
    assert list(back) == list(tensors)
    for name in tensors:
        assert torch.equal(back[name], tensors[name])
        assert back[name].is_contiguous()


def column(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)[:, None]


QKV_PARTS = {"q": column(0, 1, 2, 3), "k": column(10, 11), "v": column(20, 21)}
# (mapping, whole tensors, {(rank, size): what the rank holds})
BY_HAND = {
    "q, k and v interleave by group": (
        QKV("qkv", "q", "k", "v", 4, 2, 1, 1),  # 4 heads in 2 groups, each of one row
        QKV_PARTS,
        {(0, 1): [0, 1, 10, 20, 2, 3, 11, 21], (0, 2): [0, 1, 10, 20], (1, 2): [2, 3, 11, 21]},
    ),
    # 2 heads of 2 rows in 1 group, which two ranks share: a rank holds a run of rows, whatever they are.
    "rows of a head stay together": (
        QKV("qkv", "q", "k", "v", 2, 1, 2, None),
        {name: whole[:, 0] for name, whole in QKV_PARTS.items()},
        {(0, 1): [0, 1, 2, 3, 10, 11, 20, 21], (1, 2): [10, 11, 20, 21]},
    ),
    "the gates of a group's heads follow its queries": (
        GatedQKV("qkv", "q", "k", "v", 4, 2, 1, 1),
        {**QKV_PARTS, "q": column(0, 100, 1, 101, 2, 102, 3, 103)},
        {(0, 1): [0, 1, 100, 101, 10, 20, 2, 3, 102, 103, 11, 21], (1, 2): [2, 3, 102, 103, 11, 21]},
    ),
    # Of each of 2 heads two rows of one part and one row of another; a rank has all parts of its own heads.
    "parts of heads follow each other": (
        ByHeads("in_proj", (HeadRows("x", 2, 2, 3, 0), HeadRows("x", 2, 1, 3, 2)), (("x", (6, 1)),), (1,)),
        {"x": column(0, 1, 10, 2, 3, 11)},
        {(0, 1): [0, 1, 2, 3, 10, 11], (0, 2): [0, 1, 10], (1, 2): [2, 3, 11]},
    ),
    "gate above up on every rank": (
        GateUp("fc1", "gate", "up", 4, 1),
        {"gate": column(0, 1, 2, 3), "up": column(10, 11, 12, 13)},
        {(0, 1): [0, 1, 2, 3, 10, 11, 12, 13], (0, 2): [0, 1, 10, 11], (1, 2): [2, 3, 12, 13]},
    ),
    "zero rows behind the vocabulary": (
        Vocab("embedding", "embed_tokens", vocab_size=5, hidden=1, multiple=2),
        {"embed_tokens": column(1, 2, 3, 4, 5)},
        {(0, 1): [1, 2, 3, 4, 5, 0], (0, 2): [1, 2, 3, 4], (1, 2): [5, 0, 0, 0], (3, 4): [0, 0]},
    ),
    "columns": (
        Rename("fc2", "down", (2, 4), 1),
        {"down": torch.tensor([[0, 1, 2, 3], [10, 11, 12, 13]])},
        {(1, 2): [2, 3, 12, 13]},
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_what_a_rank_holds_by_hand(case: str) -> None:
    op, tensors, held = BY_HAND[case]
    for at, numbers in held.items():
        assert to_megatron(op, tensors, *at).flatten().tolist() == numbers
        assert to_megatron(op, tensors, *at).shape == op.shard_shape(at[1])


def test_pieces_by_hand() -> None:
    assert BY_HAND["rows of a head stay together"][0].pieces(1, 2) == [Piece("k", 0, 0, 0, 2), Piece("v", 0, 0, 2, 2)]
    assert BY_HAND["zero rows behind the vocabulary"][0].pieces(3, 4) == [], "nothing but padding"
    assert Vocab("embedding", "embed_tokens", 4, 1, 2).pieces(2, 4) == [], "which begins at the end of the vocabulary"


def test_what_is_not_sharded_is_whole_on_every_rank_and_exported_from_one() -> None:
    for op in (Rename("norm", "norm", (3,)), ValueHead("output_layer.weight", "score.weight", (1, 3))):
        tensors = numbered(op)
        assert not op.is_sharded
        shard = to_megatron(op, tensors, 1, 2)
        assert torch.equal(shard, next(iter(tensors.values())))
        assert torch.equal(op.to_hf([shard])[op.hf_name], shard)


def test_export_of_an_unsharded_parameter_shares_its_memory() -> None:
    op = GateUp("fc1", "gate", "up", 2, 3)
    whole = to_megatron(op, numbered(op))
    out = op.to_hf([whole])
    assert out["up"].data_ptr() == whole[2:].data_ptr()


def test_a_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fc1: its size 5 does not divide by tensor_model_parallel_size=2"):
        GateUp("fc1", "gate", "up", 5, 1).shard_shape(2)


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


@given(vocab=st.integers(1, 50), multiple=st.integers(1, 8), hidden=st.integers(1, 3), tp_size=st.integers(1, 5))
def test_vocab_round_trip(vocab: int, multiple: int, hidden: int, tp_size: int) -> None:
    op = Vocab("embedding", "embed_tokens", vocab, hidden, multiple)
    assert op.shard_shape(tp_size)[0] % multiple == 0
    assert op.shard_shape(tp_size)[0] * tp_size >= vocab
    round_trip(op, tp_size)


@given(n=st.integers(1, 4), m=st.integers(1, 4), tp_size=st.integers(1, 4), dim=st.sampled_from([None, 0, 1]))
def test_rename_and_gate_round_trip(n: int, m: int, tp_size: int, dim: int | None) -> None:
    shape = {None: (n, m), 0: (n * tp_size, m), 1: (n, m * tp_size)}[dim]
    op = Rename("a", "b", shape, dim)
    if dim is None:
        assert torch.equal(op.to_hf([to_megatron(op, numbered(op), tp_size - 1, tp_size)])["b"], numbered(op)["b"])
    else:
        round_trip(op, tp_size)
    round_trip(GateUp("fc1", "gate", "up", n * tp_size, m), tp_size)
