"""The device of the HF server, a CPU or one GPU: what differs between the two, in one place.

Every other file creates its tensors with `device=` and is otherwise the same for both.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def use(device: torch.device) -> None:
    """Make a GPU the calling thread's current device: a new thread begins with GPU 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def finish(device: torch.device) -> None:
    """Return when the device has done all work that was given to it, such as copies from another process' memory."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_cached(device: torch.device) -> None:
    """Give memory that torch keeps for later tensors back to the GPU, where another process may need it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def total_bytes(device: torch.device) -> int | None:
    """The memory of a GPU; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def has_float32_product(weight: Tensor) -> bool:
    """Whether torch multiplies with this 16-bit weight into float32, without rounding: on a GPU only (torch >= 2.8)."""
    is_16_bit = weight.dtype in (torch.bfloat16, torch.float16)
    return weight.is_cuda and is_16_bit and "dtype" in torch.ops.aten.mm.overloads()


class Storages:
    """The memory of tensors that can be freed and allocated again, while views of it stay valid.

    Example: storages = Storages(model.parameters()); storages.release(); ...; storages.resume(); copy new values
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._sizes = [(storage, storage.nbytes()) for storage in storages.values()]
        self.released = False

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self._sizes)

    def release(self) -> None:
        """Free the memory; the values are lost."""
        for storage, _ in self._sizes:
            storage.resize_(0)
        self.released = True

    def resume(self) -> None:
        """Allocate the memory again, without defined values."""
        for storage, size in self._sizes:
            storage.resize_(size)
        self.released = False
