"""Handing a bucket to servers on the same machine: they map the sender's memory instead of receiving bytes.

On a CPU the bucket lies in a POSIX shared-memory file (torch's `file_system` sharing: a file descriptor, torch's own
default, cannot be passed to a process that is no child).  On CUDA a server opens the memory by an IPC handle; the
device is named by its UUID, as the server may number devices in another way.

What travels is a pickle of {"flattened_tensor", "metadata"} in the form that SGLang's allow-list of names lets through;
each entry of the metadata is a SimpleNamespace with the fields that SGLang reads, so nothing of SGLang is imported.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megarl.weights.push.buckets import Bucket

_CUDA_DEVICE = 6  # which of the arguments of torch's rebuild_cuda_tensor is the device


def shared_buffer(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 that `payload` shares without a copy; OSError where shared memory has no room for it.

    The file goes when the last process lets go of it.  A process that dies with a payload unopened leaves its share of
    the count behind: then the file goes when this process ends.
    """
    try:
        storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)
    except RuntimeError as error:
        raise OSError(str(error)) from error
    name = os.fsdecode(storage._share_filename_cpu_()[1])
    with open(f"/dev/shm{name}", "r+b") as file:  # else a full /dev/shm is a SIGBUS at the first write
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def payload(bucket: Bucket) -> str:
    """Base64 for /update_weights_from_tensor; each text is to be opened once, as the memory counts who has it."""
    at, metadata = 0, []
    for name, shape, raw in zip(bucket.names, bucket.shapes, (raw for _, raw in bucket.parts()), strict=True):
        end = at + raw.numel()
        place = {"start_idx": at, "end_idx": end, "numel": raw.numel()}
        metadata.append(SimpleNamespace(name=name, shape=tuple(shape), dtype=bucket.dtype, **place))
        at = end
    return _dump({"flattened_tensor": bucket.data, "metadata": metadata})


def message(text: str) -> str:
    """Base64 for /update_weights_from_tensor with a custom loader: a text in the place of a tensor's name."""
    return _dump([(text, _Nothing())])


class _Nothing:
    """Becomes an empty tensor where it is unpickled."""

    def __reduce__(self) -> tuple[type[Tensor], tuple[()]]:
        return Tensor, ()


def _by_file_name(storage: torch.UntypedStorage) -> Any:
    """What torch does under its sharing strategy `file_system`, without setting that for the whole process."""
    manager, handle, size = storage._share_filename_cpu_()
    storage._shared_incref()  # for the process that opens it: it takes one away when it has its own
    return reductions.rebuild_storage_filename, (torch.UntypedStorage, manager, handle, size)


def _tensor(tensor: Tensor) -> Any:
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if tensor.is_cuda:
        uuid = str(torch.cuda.get_device_properties(arguments[_CUDA_DEVICE]).uuid)
        arguments = (*arguments[:_CUDA_DEVICE], uuid, *arguments[_CUDA_DEVICE + 1 :])
    return rebuild, arguments


class _Pickler(pickle.Pickler):
    dispatch_table: dict[type, Callable[[Any], Any]] = {
        Tensor: _tensor,
        torch.storage.TypedStorage: reductions.reduce_typed_storage,
        torch.UntypedStorage: _by_file_name,
    }


def _dump(value: Any) -> str:
    out = io.BytesIO()
    _Pickler(out).dump(value)
    return base64.b64encode(out.getvalue()).decode()
