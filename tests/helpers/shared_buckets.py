"""Tensors as the sender of a bucket in shared memory posts them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megarl.weights.push.buckets import Bucket
from megarl.weights.push.shared import payload, shared_buffer


def flat_bytes(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()])


def in_shared_memory(tensors: Mapping[str, Tensor], num_ranks: int = 1) -> tuple[list[str], Bucket]:
    """The text for each tensor-parallel rank; the memory lives as long as the bucket that comes with them."""
    flat = flat_bytes(tensors)
    data = shared_buffer(flat.numel())
    data.copy_(flat)
    (dtype,) = {tensor.dtype for tensor in tensors.values()}
    bucket = Bucket(list(tensors), [tuple(tensor.shape) for tensor in tensors.values()], dtype, data, is_last=True)
    return [payload(bucket) for _ in range(num_ranks)], bucket
