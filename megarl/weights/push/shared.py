"""Passing a bucket to servers on the same machine: they map the sender's memory instead of receiving bytes.

On a CPU the bucket lies in a POSIX shared-memory file (torch's `file_system` sharing).  Torch's default, a file
descriptor, can only be passed to a child process.  On CUDA a server opens the memory by an IPC handle; the device is
named by its UUID, because the server may number devices differently.

The request carries a pickle of {"flattened_tensor", "metadata"} that uses only names of SGLang's allow-list.  Each
entry of the metadata is a SimpleNamespace with the fields that SGLang reads, so SGLang is not imported.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megarl.weights.push.buckets import Bucket

_CUDA_DEVICE = 6  # index of the device among the arguments of torch's rebuild_cuda_tensor


def shared_buffer(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 that `payload` shares without a copy; OSError if shared memory has no room for it.

    The file is deleted when the last process releases it, or by `forget`: each payload that is never opened keeps the
    reference count too high.
    """
    try:
        storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)
    except RuntimeError as error:
        raise OSError(str(error)) from error
    name = os.fsdecode(storage._share_filename_cpu_()[1])
    with open(f"/dev/shm{name}", "r+b") as file:  # without this, a full /dev/shm causes SIGBUS at the first write
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def forget(buffer: Tensor) -> None:
    """Delete the file of a `shared_buffer`; its memory stays for the processes that have opened it, and no others."""
    storage = buffer.untyped_storage()
    storage._shared_incref()  # so that no process counts down to zero and misses the file
    with suppress(FileNotFoundError):
        os.unlink(f"/dev/shm{os.fsdecode(storage._share_filename_cpu_()[1])}")


def payload(bucket: Bucket) -> str:
    """Base64 for /update_weights_from_tensor; open each text exactly once, because the memory is reference-counted."""
    return _dump({"flattened_tensor": bucket.data, "metadata": _metadata(bucket)})


def copied(bucket: Bucket) -> str:
    """The same with the bytes inside, for servers that cannot map them; may be opened any number of times."""
    value = {"flattened_tensor": bucket.data, "metadata": _metadata(bucket)}
    return base64.b64encode(pickle.dumps(value)).decode()


def _metadata(bucket: Bucket) -> list[SimpleNamespace]:
    at, metadata = 0, []
    for name, shape, raw in zip(bucket.names, bucket.shapes, (raw for _, raw in bucket.parts()), strict=True):
        end = at + raw.numel()
        place = {"start_idx": at, "end_idx": end, "numel": raw.numel()}
        metadata.append(SimpleNamespace(name=name, shape=tuple(shape), dtype=bucket.dtype, **place))
        at = end
    return metadata


def message(text: str, memory: Tensor | None = None) -> str:
    """Base64 for /update_weights_from_tensor with a custom loader: `text` takes the place of a tensor's name.

    `memory`: what the server is to map, as in `payload`.
    """
    return _dump([(text, _Nothing() if memory is None else memory)])


class _Nothing:
    """Becomes an empty tensor when it is unpickled."""

    def __reduce__(self) -> tuple[type[Tensor], tuple[()]]:
        return Tensor, ()


def _by_file_name(storage: torch.UntypedStorage) -> Any:
    """Torch's sharing strategy `file_system`, without setting it for the whole process."""
    manager, handle, size = storage._share_filename_cpu_()
    storage._shared_incref()  # for the process that opens it: after opening, it decrements the count by one
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
