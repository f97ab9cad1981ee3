"""Whole tensors of Hugging Face's form -> a rank's shard: the slow way back, for tests."""

from collections.abc import Mapping

from torch import Tensor

from megarl.weights.mapping.names import Op


def to_megatron(op: Op, tensors: Mapping[str, Tensor], tp_rank: int = 0, tp_size: int = 1) -> Tensor:
    """A rank's shard, padding zero; tp_size=1 gives the whole parameter."""
    for name, shape in op.hf_shapes.items():
        assert tensors[name].shape == shape, f"{name} has shape {tuple(tensors[name].shape)}, expected {shape}"
    shard = next(iter(tensors.values())).new_zeros(op.shard_shape(tp_size))
    for piece in op.pieces(tp_rank, tp_size):
        piece.of_shard(shard).copy_(piece.of_hf(tensors[piece.hf_name]))
    return shard
