"""Buckets: how they are filled, and in shared memory from the sender's pickle into another process."""

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
from megarl.weights.push.buckets import Bucket, bucket_bytes_for, fill_buckets, plan_buckets
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


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


class OpensAFile:
    """Shared memory that would be opened through a socket of the sender's choice."""

    def __init__(self, manager: str, handle: str) -> None:
        self.arguments = (torch.UntypedStorage, manager.encode(), handle.encode(), 8)

    def __reduce__(self):
        return reductions.rebuild_storage_filename, self.arguments


MANAGER = os.fsdecode(shared_buffer(8).untyped_storage()._share_filename_cpu_()[0])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Evil(), "system, which is not allowed"),
        ({"flattened_tensor": Evil(), "metadata": []}, "which is not allowed"),
        (subprocess.run, "subprocess.run, which is not allowed"),
        (torch.load, "torch.serialization.load, which is not allowed"),
        (torch.zeros(2), "which is not allowed"),  # torch's own pickles run torch.load inside
        (OpensAFile("/etc/passwd", "/torch_1_2_3"), "managed at /etc/passwd: expected a socket of this user"),
        (OpensAFile(MANAGER, "/somebody_elses"), "expected a name as torch gives them"),
        ({"metadata": []}, "no flattened bucket"),
        ({"flattened_tensor": 1, "metadata": []}, "expected a row of uint8"),
    ],
)
def test_a_pickle_that_asks_for_more_than_shared_tensors_is_refused(value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_bucket(encoded(value))


def test_what_is_no_pickle_is_refused() -> None:
    for text in ("", "!", "AAAA", base64.b64encode(b"\x80\x04.").decode()):
        with pytest.raises(ValueError):
            read_bucket(text)


PROTOCOL_2 = pickle.PROTO + b"\x02"
NAMES = {
    "torch": ["Tensor", "Size", "uint8", "float32"],
    "types": ["SimpleNamespace"],
    "torch.storage": ["UntypedStorage", "TypedStorage"],
    "torch.multiprocessing.reductions": [
        *("rebuild_tensor", "rebuild_typed_storage", "rebuild_storage_filename", "rebuild_cuda_tensor"),
    ],
}


def global_of(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def text_of(text: str) -> bytes:
    return pickle.BINUNICODE + len(text).to_bytes(4, "little") + text.encode()


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in NAMES for name in NAMES[module]])
@pytest.mark.parametrize("in_slots", [True, False])
def test_a_payload_changes_nothing_that_it_names(module: str, name: str, in_slots: bool) -> None:
    """The opcode BUILD sets attributes of whatever a pickle names, also of classes of torch."""
    target = getattr(sys.modules[module], name)
    if not in_slots and isinstance(target, type):
        return  # a class has no dictionary that can be written to
    before = {key: getattr(target, key, None) for key in ("element_size", "__name__", "__defaults__", "__doc__", "x")}
    pairs = b"".join(text_of(key) + global_of("torch", "Size") for key in ("element_size", "__name__", "__doc__", "x"))
    state = pickle.EMPTY_DICT + pickle.MARK + pairs + pickle.SETITEMS
    if in_slots:
        state = pickle.NONE + state + pickle.TUPLE2
    attack = PROTOCOL_2 + global_of(module, name) + state + pickle.BUILD + pickle.STOP
    with pytest.raises(ValueError):
        read_bucket(base64.b64encode(attack).decode())
    assert before == {key: getattr(target, key, None) for key in before}
    assert torch.ones(2).untyped_storage().element_size() == 1


HANDLE = b"\x02c" + bytes(range(64))  # torch's version, its kind cudaMalloc, and CUDA's handle


class OnGpu:
    """The pickle of a bucket in GPU memory, as `payload` writes it: the GPU is named by its UUID."""

    def __init__(self, uuid: str = "GPU-1", *, fields: int = 15, **changes: object) -> None:
        place = (torch.Tensor, torch.Size([32]), (1,), 0, torch.storage.TypedStorage, torch.uint8, uuid)
        shared = {"handle": HANDLE, "size": 32, "offset": 64, "grad": False, "counter": b"/torch_1_2_3", "count": 9999}
        self.arguments = (*place, *(shared | changes).values(), b"event", True)[:fields]

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
    found = read_bucket(_dump({"flattened_tensor": OnGpu(handle=handle), "metadata": [entry]}))
    assert found["a"].tolist() == [[4.0, 5.0], [6.0, 7.0]]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (OnGpu("GPU-2"), "lies on GPU 'GPU-2', which this server does not see"),
        (OnGpu(counter=b"/somebody_elses"), "expected a name as torch gives them"),
        (OnGpu(fields=14), "has 7 fields: expected 8"),
        (OnGpu(size=-1), "storage_size_bytes=-1: expected an integer from 0"),
        (OnGpu(offset=1.5), "storage_offset_bytes=1.5: expected an integer from 0"),
        (OnGpu(count=10_000), "ref_counter_offset=10000: expected an integer from 0 to 9999"),
        (OnGpu(count=-1), "ref_counter_offset=-1"),
        (OnGpu(count=True), "ref_counter_offset=True"),
        (OnGpu(handle=b"\x02e" + HANDLE), "another handle than one of cudaMalloc"),
        (OnGpu(handle=1), "another handle than one of cudaMalloc"),
    ],
)
def test_memory_of_a_gpu_that_is_not_as_torch_shares_it_is_refused(two_gpus: None, value: OnGpu, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_bucket(encoded({"flattened_tensor": value, "metadata": []}))


def test_the_fields_of_shared_gpu_memory_are_those_of_torch() -> None:
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    shared = ["storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad", "ref_counter_handle"]
    assert names[6:] == ["storage_device", *shared, "ref_counter_offset", "event_handle", "event_sync_required"]


@pytest.mark.parametrize("change", [{"end_idx": 24, "shape": (9,)}, {"shape": "x"}, {"dtype": 3}, {"start_idx": 1}])
def test_metadata_that_does_not_fit_its_bucket_is_refused(change: dict[str, object]) -> None:
    entry = SimpleNamespace(
        **{"name": "a", "shape": (6,), "dtype": torch.float32, "start_idx": 0, "end_idx": 24} | change
    )
    with pytest.raises(ValueError, match="does not fit its bucket"):
        read_bucket(_dump({"flattened_tensor": shared_buffer(32), "metadata": [entry]}))


def test_a_message_is_a_text_in_the_place_of_a_name() -> None:
    ((text, tensor),) = read_message(message('{"a": 1}'))
    assert text == '{"a": 1}' and tensor.numel() == 0
    for value in ({"a": 1}, [("a", 1)], [SimpleNamespace(a=1)]):
        with pytest.raises(ValueError, match="no list of named tensors"):
            read_message(encoded(value))


def test_a_server_of_one_rank_wants_one_payload() -> None:
    assert one_payload(["x"]) == "x"
    for wrong in ([], ["x", "y"], [3]):
        with pytest.raises(ValueError, match="expected one text"):
            one_payload(wrong)


F32, BF16 = torch.float32, torch.bfloat16
SIZES = {"a": ((2,), F32), "b": ((3,), F32), "c": ((4,), BF16), "d": ((9,), BF16), "e": ((1,), BF16)}


def stream():
    for i, (name, (shape, dtype)) in enumerate(SIZES.items()):
        yield name, torch.full(shape, float(i), dtype=dtype)


def test_a_bucket_holds_one_type_up_to_a_limit() -> None:
    assert plan_buckets(SIZES, 1000) == [["a", "b"], ["c", "d", "e"]]
    assert plan_buckets(SIZES, 20) == [["a", "b"], ["c"], ["d", "e"]]
    assert plan_buckets(SIZES, 12) == [["a"], ["b"], ["c"], ["d"], ["e"]]  # d alone is larger than the limit


def test_tensors_that_a_server_fuses_share_a_bucket_and_no_others_must() -> None:
    names = [f"layers.{i}.self_attn.{x}.weight" for i in (0, 1) for x in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")]
    for limit, plan in ((1, [names[:2], names[2:3], names[3:5], names[5:]]), (12, [names[:3], names[3:]])):
        assert plan_buckets(dict.fromkeys(names, ((1,), F32)), limit) == plan


def test_buckets_hold_the_bytes_of_their_tensors_in_order() -> None:
    seen, last, before = {}, [], None
    for bucket in fill_buckets(stream(), SIZES, 20):
        assert before is None or torch.equal(*before), "a bucket stays as it is while the next one is filled"
        before = bucket.data, bucket.data.clone()
        last.append(bucket.is_last)
        for name, raw in bucket.parts():
            shape, dtype = SIZES[name]
            seen[name] = raw.clone().view(dtype).view(shape)
    assert last == [False, False, True]
    for name, tensor in stream():
        assert torch.equal(seen[name], tensor)


def test_two_buckets_in_turn_share_the_memory_of_two_buffers() -> None:
    made = []

    def new_buffer(num_bytes, device):
        made.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    found = [bucket.data for bucket in fill_buckets(stream(), SIZES, 12, new_buffer=new_buffer)]
    assert [len(data) for data in found] == [8, 12, 8, 18, 2]
    assert made == [8, 18], "each as large as the largest bucket that it will hold"
    assert found[0].data_ptr() == found[2].data_ptr() == found[4].data_ptr() != found[1].data_ptr()
    assert found[1].data_ptr() == found[3].data_ptr()


def test_the_size_of_buckets_follows_that_of_the_model() -> None:
    def size_of(numbers):
        return bucket_bytes_for({"w": ((numbers,), BF16)})

    assert [size_of(10**6), size_of(16 * 10**9), size_of(10**12)] == [2**26, 500 * 10**6, 2**31]
