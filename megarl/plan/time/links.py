"""Times of communication between the GPUs of a group: inside a machine over links, between machines over adapters."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.plan.gpus import Gpu
from megarl.plan.time.constants import Constants


@dataclass(frozen=True)
class Links:
    """Reached bandwidths, B/s of a GPU in one direction."""

    link: float
    nic: float
    domain: int  # GPUs connected by the links

    @classmethod
    def of(cls, gpu: Gpu, domain: int, constants: Constants) -> Links:
        return cls(gpu.link_bandwidth * constants.link, gpu.nic_bandwidth * constants.nic, domain)

    def ring(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """Seconds of a gather or a reduce-scatter of num_bytes over `size` GPUs, each `stride` from the next.

        Between machines, the members on one machine use the adapters of all of them.
        """
        if size == 1:
            return 0.0
        moved = num_bytes * (size - 1) / size
        if size * stride <= self.domain:
            return moved / self.link
        members = max(1, self.domain // stride)
        return moved / min(self.link, self.nic * members)

    def exchange(self, num_bytes: float, size: int, stride: int, copies: int, *, once: bool = False) -> float:
        """Seconds of an all-to-all in which each of `size` GPUs sends num_bytes to `copies` random ones of them.

        once: data for several GPUs of another machine is sent there once and copied inside it.
        """
        if size == 1:
            return 0.0
        inside = min(size, max(1, self.domain // stride))
        machines = size / inside
        near, far = copies * (inside - 1) / size, copies * (size - inside) / size
        if once:
            far = (machines - 1) * (1 - (1 - 1 / machines) ** copies)
        return num_bytes * max(near / self.link, far / self.nic)

    def hop(self, num_bytes: float, stride: int) -> float:
        """Seconds of a send from a GPU to the GPU `stride` after it."""
        return num_bytes / (self.link if stride < self.domain else self.nic)
