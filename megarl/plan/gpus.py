"""What a GPU can do, by its data sheet: the ceilings that predictions and MFU are measured against.

Sources, all of dense bf16 (sheets that print sparse numbers are halved) and of one direction of a link:
NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM and B200 (DGX B200: an eighth of the machine), of the GB200
NVL72 (a 72nd of the rack); of H800 and H20, which have no public sheet, what vendors of machines print.  Network: one
400 Gb/s adapter for each GPU (A100: 200 Gb/s), as in the DGX machines.  Memory is in units of 10^9 bytes, as GPUs are
named; host_bandwidth is PCIe 5 (A100: 4), and NVLink-C2C on GB200.
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
    link_domain: int | None = None  # GPUs that the links join; None: those of a machine


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

# words of a device's name that make it another product than the one of the table: slower, or a part of it
_OTHERS = {"pcie", "nvl", "mig"}


def find(name: str) -> Gpu:
    """The GPU that `torch.cuda.get_device_name` or a person calls so.  ValueError where the table has none."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    for word in words:
        if word in GPUS and not _OTHERS & set(words):
            return GPUS[word]
    raise ValueError(f"gpu={name}: what it can do is not known here (megarl/plan/gpus.py); expected {', '.join(GPUS)}")


def of_memory(gigabytes: int) -> Gpu:
    """The GPU that a layout's name means: 64x80 is of H100, 64x141 of H200.  ValueError for another size."""
    for name in ("h100", "h200", "h20", "b200", "gb200"):
        if GPUS[name].memory_bytes == gigabytes * 10**9:
            return GPUS[name]
    raise ValueError(f"layout=...x{gigabytes}: no GPU of {gigabytes} GB is known; expected --gpu {', '.join(GPUS)}")
