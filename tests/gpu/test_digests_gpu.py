"""On a real GPU: Triton's hash of words against torch's operations, and one tensor of real size."""

import pytest
import torch
from words_cases import all_cases

from megarl.weights.verify import digests, weight_hash_triton

pytestmark = pytest.mark.gpu


def test_the_kernel_hashes_as_torchs_operations_do() -> None:
    assert digests._gpu_tile_sums is weight_hash_triton.tile_sums
    for sizes, (by_kernel, by_torch) in all_cases("cuda").items():
        assert by_kernel == by_torch, sizes


def test_a_tensor_has_the_same_digest_on_both_devices() -> None:
    x = torch.randn(151_936, 1024, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert digests.digest(x.cuda(), "words") == digests.digest(x, "words")
