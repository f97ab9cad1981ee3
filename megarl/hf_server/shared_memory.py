"""Unpickles the payload of /update_weights_from_tensor on the HF server, without trust in the sender.

A pickle may call any function.  Here only an allow-list is available: the functions that rebuild a tensor over shared
memory or over GPU memory of another process (CUDA IPC), plain values, and torch's dtypes.  Shared memory is opened only
under names that torch creates, through a manager socket of the same user.  What a payload names is made for this
payload alone, or cannot be changed, so that no payload changes anything for another one.  A sender with the server's
token can still make the server read and write memory that this user already shares, and nothing else.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megarl.rollout.protocol import DTYPES

_PATIENCE = 5  # attempts: torch waits one second for its manager, which may be too short on a busy machine
_HANDLE = re.compile(r"/torch_\d+_\d+_\d+")
_CUDA_STORAGE_FIELDS = 8  # those after the device among rebuild_cuda_tensor's arguments
_CUDA_COUNTERS = 10_000  # reference counts in one file of torch's (CUDA_IPC_REF_COUNTER_FILE_SIZE in CudaIPCTypes.h)
_CUDA_HANDLE_BYTES = 64  # of CUDA's own IPC handles (CUDA_IPC_HANDLE_SIZE)


def read_bucket(text: str) -> dict[str, Tensor]:
    """Named tensors over memory that another process shares.  Raises ValueError for any other payload."""
    value = _load(text)
    if not isinstance(value, Mapping) or set(value) != {"flattened_tensor", "metadata"}:
        raise ValueError("the payload is no flattened bucket: expected flattened_tensor and metadata")
    flat, metadata = value["flattened_tensor"], value["metadata"]
    if not isinstance(flat, Tensor) or flat.dtype != torch.uint8 or flat.dim() != 1 or not isinstance(metadata, list):
        raise ValueError("flattened_tensor and metadata of the payload: expected a row of uint8 and a list")
    return dict(_part(flat, entry) for entry in metadata)


def read_message(text: str) -> list[tuple[str, Tensor]]:
    """The list of named tensors for a custom weight loader.  Raises ValueError for any other payload."""
    value = _load(text)
    if not isinstance(value, list) or not all(
        isinstance(item, tuple) and [type(part) for part in item] == [str, Tensor] for item in value
    ):
        raise ValueError("the payload is no list of named tensors")
    return value


def _part(flat: Tensor, entry: Any) -> tuple[str, Tensor]:
    try:
        raw = flat[entry.start_idx : entry.end_idx]
        return str(entry.name), raw.view(entry.dtype).view(entry.shape)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ValueError(f"an entry of the payload's metadata does not fit its bucket: {error}") from error


def _load(text: str) -> Any:
    try:
        return _Unpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
    except ValueError:
        raise
    except Exception as error:  # a pickle can raise any exception
        raise ValueError(f"the payload cannot be read: {type(error).__name__} {error}") from error


def _open_storage(_class: Any, manager: Any, handle: Any, size: int) -> Any:
    path = os.fsdecode(manager)
    status = os.lstat(path)
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.getuid():
        raise ValueError(f"the payload's shared memory is managed at {path}: expected a socket of this user")
    _check_name(handle)
    for _ in range(_PATIENCE):
        try:
            return reductions.rebuild_storage_filename(torch.UntypedStorage, manager, handle, int(size))
        except RuntimeError as error:
            failure = error
    raise failure


def _open_cuda_tensor(
    _class: Any, size: Any, stride: Any, offset: Any, _storage_class: Any, dtype: Any, uuid: Any, *storage: Any
) -> Tensor:
    """As torch's rebuild_cuda_tensor, but the GPU is named by its UUID, as the sender does (weights.push.shared).

    `storage`: the IPC handle of the allocation, its place there, and the handles by which torch counts references, of
    which one is the name of shared memory.  torch writes to the count at its index in this memory without a check.
    """
    if len(storage) != _CUDA_STORAGE_FIELDS:
        raise ValueError(
            f"the payload's GPU memory has {len(storage)} fields: expected {_CUDA_STORAGE_FIELDS}, as torch"
        )
    handle, num_bytes, offset_bytes, _, counters, counter, *_ = storage
    _check_name(counters)
    _check_number("storage_size_bytes", num_bytes)
    _check_number("storage_offset_bytes", offset_bytes)
    _check_number("ref_counter_offset", counter, _CUDA_COUNTERS)
    _check_cuda_handle(handle)
    gpus = range(torch.cuda.device_count())
    numbers = [gpu for gpu in gpus if str(torch.cuda.get_device_properties(gpu).uuid) == uuid]
    if not numbers:
        raise ValueError(f"the payload lies on GPU {uuid!r}, which this server does not see")
    return reductions.rebuild_cuda_tensor(
        Tensor, size, stride, offset, torch.storage.TypedStorage, dtype, numbers[0], *storage
    )


def _check_number(name: str, value: Any, end: int = 2**63) -> None:
    if type(value) is not int or not 0 <= value < end:
        raise ValueError(f"the payload's GPU memory has {name}={value!r}: expected an integer from 0 to {end - 1}")


def _check_cuda_handle(handle: Any) -> None:
    """Only memory of cudaMalloc: torch opens an expandable segment by file descriptors of any process that it names.

    torch writes a byte for its version and one for the kind before CUDA's handle; early versions wrote neither
    (CUDACachingAllocator.cpp).
    """
    if type(handle) is not bytes or (len(handle) != _CUDA_HANDLE_BYTES and handle[1:2] != b"c"):
        raise ValueError(
            "the payload's GPU memory has another handle than one of cudaMalloc: expected a trainer without "
            "expandable_segments in PYTORCH_CUDA_ALLOC_CONF"
        )


def _check_name(handle: Any) -> None:
    if not _HANDLE.fullmatch(os.fsdecode(handle)):
        raise ValueError(f"the payload's shared memory is named {handle!r}: expected a name as torch gives them")


# Values that a payload cannot change: built-in classes and dtypes.
_VALUES: dict[tuple[str, str], Any] = {
    ("types", "SimpleNamespace"): SimpleNamespace,
    ("torch", "Size"): torch.Size,
    **{("torch", name): dtype for name, dtype in {**DTYPES, "uint8": torch.uint8}.items()},
}
# Classes that a payload names only to pass them on, and the first one to make an empty tensor.
_CLASSES = {("torch", "Tensor"), ("torch.storage", "UntypedStorage"), ("torch.storage", "TypedStorage")}
_MAKERS: dict[str, Callable[..., Any]] = {
    "rebuild_tensor": lambda _class, storage, metadata: reductions.rebuild_tensor(Tensor, storage, metadata),
    "rebuild_typed_storage": reductions.rebuild_typed_storage,
    "rebuild_storage_filename": _open_storage,
    "rebuild_cuda_tensor": _open_cuda_tensor,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        if (module, name) in _CLASSES:
            return lambda: Tensor()
        if module == reductions.__name__ and name in _MAKERS:
            return lambda *values: _MAKERS[name](*values)
        raise ValueError(f"the payload names {module}.{name}, which is not allowed")


def one_payload(payloads: Sequence[Any]) -> str:
    """The payload of this server's only rank.  Raises ValueError if there is not exactly one."""
    if len(payloads) != 1 or not isinstance(payloads[0], str):
        raise ValueError(f"serialized_named_tensors has {len(payloads)} entries: expected one text, for the only rank")
    return payloads[0]
