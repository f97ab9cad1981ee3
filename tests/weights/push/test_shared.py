"""Buckets in shared memory: from the sender's pickle into another process, and what a server refuses to read."""

import base64
import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing import reductions

from megarl.hf_server.shared_memory import one_payload, read_bucket, read_message
from megarl.weights.push.buckets import Bucket
from megarl.weights.push.shared import _dump, message, payload, shared_buffer


def make_bucket(buffer: torch.Tensor) -> tuple[Bucket, dict[str, torch.Tensor]]:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([7.0, 8.0])}
    buffer[:32].copy_(torch.cat([t.reshape(-1) for t in tensors.values()]).view(torch.uint8))
    return Bucket(["a", "b"], [(2, 3), (2,)], torch.float32, buffer[:32], True), tensors


def encoded(value: object) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def test_another_process_maps_the_bucket_and_the_file_goes_with_the_sender(tmp_path: Path) -> None:
    def of_this_process() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}

    before = of_this_process()
    bucket, tensors = make_bucket(shared_buffer(64))
    (tmp_path / "payload").write_text(payload(bucket))
    mine = of_this_process() - before
    script = "import sys; from megarl.hf_server.shared_memory import read_bucket as r\n"
    script += "print({n: t.tolist() for n, t in r(open(sys.argv[1]).read()).items()})"
    out = subprocess.run([sys.executable, "-c", script, tmp_path / "payload"], capture_output=True, text=True)
    assert out.stdout.strip() == str({name: tensor.tolist() for name, tensor in tensors.items()}), out.stderr
    assert mine <= set(os.listdir("/dev/shm"))  # the sender may fill it again
    del bucket
    assert mine and not mine & set(os.listdir("/dev/shm"))


def test_a_buffer_that_does_not_fit_is_an_error_and_no_crash() -> None:
    with pytest.raises(OSError, match="No space left|File too large|unable to allocate"):
        shared_buffer(1 << 50)


def test_a_message_is_a_text_in_the_place_of_a_name() -> None:
    ((text, tensor),) = read_message(message('{"a": 1}'))
    assert text == '{"a": 1}' and tensor.numel() == 0


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


class OpensAFile:
    """Shared memory that would be opened through a socket of the sender's choice."""

    def __init__(self, manager: str, handle: str) -> None:
        self.arguments = (torch.UntypedStorage, manager.encode(), handle.encode(), 8)

    def __reduce__(self):
        return reductions.rebuild_storage_filename, self.arguments


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Evil(), "system, which is not allowed"),
        ({"flattened_tensor": Evil(), "metadata": []}, "which is not allowed"),
        (subprocess.run, "subprocess.run, which is not allowed"),
        (torch.load, "torch.serialization.load, which is not allowed"),
        (torch.zeros(2), "which is not allowed"),  # torch's own pickles run torch.load inside
        (OpensAFile("/etc/passwd", "/torch_1_2_3"), "managed at /etc/passwd: expected a socket of this user"),
        ({"metadata": []}, "no flattened bucket"),
        ({"flattened_tensor": 1, "metadata": []}, "expected a row of uint8"),
    ],
)
def test_a_pickle_that_asks_for_more_than_shared_tensors_is_refused(value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_bucket(encoded(value))


def test_shared_memory_under_a_foreign_name_is_refused(tmp_path: Path) -> None:
    manager, _, _ = shared_buffer(8).untyped_storage()._share_filename_cpu_()
    with pytest.raises(ValueError, match="expected a name as torch gives them"):
        read_bucket(encoded(OpensAFile(os.fsdecode(manager), "/somebody_elses")))


HANDLE = b"\x02c" + bytes(range(64))  # torch's version, its kind cudaMalloc, and CUDA's handle


class OnGpu:
    """The pickle of a bucket in GPU memory, as `payload` writes it: the GPU is named by its UUID."""

    def __init__(
        self,
        uuid: str,
        counter: bytes = b"/torch_1_2_3",
        fields: int = 15,
        handle: object = HANDLE,
        size: object = 32,
        offset: object = 64,
        count: object = 9999,
    ) -> None:
        place = (torch.Tensor, torch.Size([32]), (1,), 0, torch.storage.TypedStorage, torch.uint8, uuid)
        self.arguments = (*place, handle, size, offset, False, counter, count, b"event", True)[:fields]

    def __reduce__(self):
        return reductions.rebuild_cuda_tensor, self.arguments


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, and torch's opening of their memory, which yields a bucket of numbers here."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=f"GPU-{gpu}"))
    opened = torch.arange(8.0).view(torch.uint8)

    def rebuild(cls, size, stride, offset, storage_cls, dtype, device, handle, *rest):  # noqa: ANN001
        assert (cls, size, stride, offset) == (torch.Tensor, torch.Size([32]), (1,), 0)
        assert (storage_cls, dtype) == (torch.storage.TypedStorage, torch.uint8)
        assert handle in (HANDLE, HANDLE[2:])
        assert rest == (32, 64, False, b"/torch_1_2_3", 9999, b"event", True)
        return opened + 0 if device == 1 else torch.zeros(32, dtype=torch.uint8)

    rebuild.__module__, rebuild.__qualname__ = reductions.__name__, "rebuild_cuda_tensor"  # for its own pickle
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)


@pytest.mark.parametrize("handle", [HANDLE, HANDLE[2:]])
def test_memory_of_a_gpu_is_opened_on_the_gpu_of_that_uuid(two_gpus: None, handle: bytes) -> None:
    entry = SimpleNamespace(name="a", shape=(2, 2), dtype=torch.float32, start_idx=16, end_idx=32)
    found = read_bucket(_dump({"flattened_tensor": OnGpu("GPU-1", handle=handle), "metadata": [entry]}))
    assert found["a"].tolist() == [[4.0, 5.0], [6.0, 7.0]]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (OnGpu("GPU-2"), "lies on GPU 'GPU-2', which this server does not see"),
        (OnGpu("GPU-1", counter=b"/somebody_elses"), "expected a name as torch gives them"),
        (OnGpu("GPU-1", fields=14), "has 7 fields: expected 8"),
        (OnGpu("GPU-1", size=-1), "storage_size_bytes=-1: expected an integer from 0"),
        (OnGpu("GPU-1", offset=1.5), "storage_offset_bytes=1.5: expected an integer from 0"),
        (OnGpu("GPU-1", count=10_000), "ref_counter_offset=10000: expected an integer from 0 to 9999"),
        (OnGpu("GPU-1", count=-1), "ref_counter_offset=-1"),
        (OnGpu("GPU-1", count=True), "ref_counter_offset=True"),
        (OnGpu("GPU-1", handle=b"\x02e" + HANDLE), "another handle than one of cudaMalloc"),
        (OnGpu("GPU-1", handle=1), "another handle than one of cudaMalloc"),
    ],
)
def test_memory_of_a_gpu_that_is_not_as_torch_shares_it_is_refused(two_gpus: None, value: OnGpu, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_bucket(encoded({"flattened_tensor": value, "metadata": []}))


def test_the_fields_of_shared_gpu_memory_are_those_of_torch() -> None:
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names[6:] == [
        "storage_device",
        "storage_handle",
        "storage_size_bytes",
        "storage_offset_bytes",
        "requires_grad",
        "ref_counter_handle",
        "ref_counter_offset",
        "event_handle",
        "event_sync_required",
    ]


@pytest.mark.parametrize("text", ["", "!", "AAAA", base64.b64encode(b"\x80\x04.").decode()])
def test_what_is_no_pickle_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_bucket(text)


@pytest.mark.parametrize("change", [{"end_idx": 24, "shape": (9,)}, {"shape": "x"}, {"dtype": 3}, {"start_idx": 1}])
def test_metadata_that_does_not_fit_its_bucket_is_refused(change: dict[str, object]) -> None:
    entry = SimpleNamespace(
        **{"name": "a", "shape": (6,), "dtype": torch.float32, "start_idx": 0, "end_idx": 24} | change
    )
    with pytest.raises(ValueError, match="does not fit its bucket"):
        read_bucket(_dump({"flattened_tensor": shared_buffer(32), "metadata": [entry]}))


def test_named_tensors_must_be_a_list_of_names_and_tensors() -> None:
    for value in ({"a": 1}, [("a", 1)], [SimpleNamespace(a=1)]):
        with pytest.raises(ValueError, match="no list of named tensors"):
            read_message(encoded(value))


def test_a_server_of_one_rank_wants_one_payload() -> None:
    assert one_payload(["x"]) == "x"
    for wrong in ([], ["x", "y"], [3]):
        with pytest.raises(ValueError, match="expected one text"):
            one_payload(wrong)
