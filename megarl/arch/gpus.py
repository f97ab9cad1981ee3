"""Data sheet numbers of GPUs: the upper limits for predictions and MFU.

All numbers are for dense bf16 (sparse numbers of a sheet are halved) and one direction of a link.  Sources:
NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM and B200 (DGX B200: an eighth of the machine), and of the
GB200 NVL72 (a 72nd of the rack); for H800 and H20, which have no public sheet, server vendors' numbers.  Network: a
400 Gb/s adapter per GPU (A100: 200 Gb/s), as in DGX machines.  Memory is in units of 10^9 bytes, as in the GPUs'
names; host_bandwidth is PCIe 5 (A100: 4), and NVLink-C2C on GB200.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Example: find("NVIDIA H100 80GB HBM3").bf16_flops -> 989.4e12."""

    name: str
    bf16_flops: float  # FLOP/s of dense matrix products
    memory_bytes: int
    memory_bandwidth: float  # B/s
    link_bandwidth: float  # B/s to other GPUs of the machine, one direction
    nic_bandwidth: float  # B/s to other machines, one direction
    host_bandwidth: float = 55e9  # B/s to host memory, one direction
    host_bytes: int | None = None  # host memory of a machine; None: unknown
    link_domain: int | None = None  # GPUs connected by the links; None: those of a machine


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 312e12, 80 * 10**9, 2.039e12, 300e9, 25e9, host_bandwidth=25e9),
        Gpu("h100", 989.4e12, 80 * 10**9, 3.35e12, 450e9, 50e9),
        Gpu("h800", 989.4e12, 80 * 10**9, 3.35e12, 200e9, 50e9),
        Gpu("h200", 989.4e12, 141 * 10**9, 4.8e12, 450e9, 50e9),
        Gpu("h20", 148e12, 96 * 10**9, 4.0e12, 450e9, 50e9),
        Gpu("b200", 2250e12, 180 * 10**9, 8.0e12, 900e9, 50e9),
        Gpu("gb200", 2500e12, 186 * 10**9, 8.0e12, 900e9, 50e9, host_bandwidth=225e9, link_domain=72),
    )
}

# words in a device's name that mark a different product from the one in the table: slower, or a part of it
_OTHERS = {"pcie", "nvl", "mig"}


def find(name: str) -> Gpu:
    """The GPU with this name, from `torch.cuda.get_device_name` or a user.  Raises: ValueError if it is unknown."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    for word in words:
        if word in GPUS and not _OTHERS & set(words):
            return GPUS[word]
    raise ValueError(f"gpu={name}: what it can do is not known here (megarl/arch/gpus.py); expected {', '.join(GPUS)}")


def of_memory(gigabytes: int) -> Gpu:
    """The GPU of a layout's name: 64x80 means H100, 64x141 means H200.  Raises: ValueError for another size."""
    for name in ("h100", "h200", "h20", "b200", "gb200"):
        if GPUS[name].memory_bytes == gigabytes * 10**9:
            return GPUS[name]
    raise ValueError(f"layout=...x{gigabytes}: no GPU of {gigabytes} GB is known; expected --gpu {', '.join(GPUS)}")
