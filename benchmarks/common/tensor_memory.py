"""How much memory tensors take: on a CPU counted storage by storage, on a GPU as torch's allocator says it."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """Watches what is made inside it: `with TensorMemory() as memory: ...; memory.peak_bytes`.

    What lives before is not counted, nor what one operation uses inside itself.
    """

    def __init__(self, *before: Tensor) -> None:
        """`before`: tensors that operations may give back (a view, a result written in place) and that are not new."""
        super().__init__()
        self.peak_bytes = self.now_bytes = 0
        self.largest_elements = 0  # of any new tensor
        storages = [tensor.untyped_storage() for tensor in before]
        self._known = {storage._cdata: StorageWeakRef(storage) for storage in storages}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def forget_peak(self) -> None:
        """The peak is what there is now."""
        self._forget()
        self.peak_bytes = self.now_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)], are_new=False)
        out = func(*args, **(kwargs or {}))
        self._note([leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)], are_new=True)
        return out

    def _note(self, tensors: list[Tensor], *, are_new: bool) -> None:
        self._forget()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata in self._known or storage._cdata in self._alive:
                continue
            if not are_new:  # made outside
                self._known[storage._cdata] = StorageWeakRef(storage)
                continue
            self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            self.now_bytes += storage.nbytes()
            self.largest_elements = max(self.largest_elements, storage.nbytes() // tensor.element_size())
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _forget(self) -> None:
        """What is gone counts no more, and its address may be another's."""
        for key in [key for key, ref in self._known.items() if ref.expired()]:
            del self._known[key]
        for key in [key for key, (ref, _) in self._alive.items() if ref.expired()]:
            self.now_bytes -= self._alive.pop(key)[1]


class GpuMemory:
    """The same of the GPU in use: what torch's allocator has given out since; it rounds each tensor up to 512 bytes."""

    def __enter__(self) -> Self:
        torch.cuda.synchronize()
        self._before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    @property
    def now_bytes(self) -> int:
        return torch.cuda.memory_allocated() - self._before

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before


def watched(device: str) -> TensorMemory | GpuMemory:
    """For `with`: what tensors on "cpu" or "cuda" take."""
    return GpuMemory() if device == "cuda" else TensorMemory()


def peak_bytes(work: Any, device: str) -> int:
    """The most bytes that `work()` makes beyond what is there before it."""
    with watched(device) as memory:
        work()
    return memory.peak_bytes
