"""GPUs by the names that people and drivers give them."""

import pytest

from megarl.arch.gpus import GPUS, find, of_memory


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("H100", "h100"),
    ],
)
def test_a_device_is_known_by_its_name(said, name):
    assert find(said) is GPUS[name]


@pytest.mark.parametrize(
    "said",
    ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "cpu", ""],
)
def test_another_product_is_not_taken_for_it(said):
    with pytest.raises(ValueError, match=f"^gpu={said}: what it can do is not known here .*; expected a100, h100"):
        find(said)


def test_a_layout_is_named_by_its_memory():
    assert (of_memory(80).name, of_memory(141).name) == ("h100", "h200")
    with pytest.raises(ValueError, match="no GPU of 17 GB is known; expected --gpu"):
        of_memory(17)


def test_all_that_a_gpu_has_is_some():
    for gpu in GPUS.values():
        assert gpu.bf16_flops > 1e14 and gpu.memory_bytes > 10**10
        assert gpu.memory_bandwidth > gpu.link_bandwidth > gpu.nic_bandwidth > 10**10
