"""What the server does for a GPU, as far as a CPU shows it: one device for all tensors, memory freed and taken back."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.hf_server import device as devices
from megarl.hf_server.kv_cache import Decode, Prefill
from megarl.hf_server.model import HFModel
from megarl.hf_server.running_batch import Call, Running
from megarl.hf_server.sampling import uniforms
from megarl.hf_server.scheduler import CACHE, WEIGHTS, HFEngine
from megarl.hf_server.weights import WeightUpdates
from megarl.rollout.protocol import SamplingParams
from megarl.weights.hf.folder import open_hf

META = torch.device("meta")  # torch refuses to mix it with a CPU, as it refuses to mix a GPU with a CPU
GPU = torch.device("cuda", 0)


@pytest.fixture
def model(model_path: str) -> HFModel:
    return HFModel(model_path, torch.float32)


@pytest.fixture
def engine(model: HFModel) -> HFEngine:
    """Not started: the tests run its orders themselves."""
    how: dict[str, Any] = {"max_running": 4, "max_total_tokens": None, "random_seed": 0, "weight_version": "0"}
    return HFEngine(model, **how, on_done=lambda calls: None, on_death=lambda error: None)


@torch.inference_mode()
def test_both_passes_and_the_running_batch_stay_on_the_models_device(model: HFModel) -> None:
    model._model.to(META)
    model.device = META
    cache = model.new_cache(max_tokens=1000)
    cache.reserve(3, 20, used=(0, 0))
    tokens = torch.zeros(2, 5, dtype=torch.int64, device=META)
    hidden = model.prefill(tokens, Prefill(cache, 0, [0, 0, 1], [2, 0], [3, 5]))
    assert (hidden.device, hidden.shape[:2]) == (META, (2, 5))
    positions = torch.tensor([5, 5, 5], device=META)
    logits = model.decode(tokens[:1, :3].reshape(3), Decode(cache, positions, 6), positions, 6)
    assert (logits.device, logits.shape) == (META, (3, model.vocab_size))
    cache.reserve(4, 40, used=(3, 6))
    assert cache.bytes_per_token == 4 * cache.tensors[0][0, 0].numel() * len(cache.tensors)
    cache.move(torch.tensor([2], device=META), torch.tensor([0], device=META), 6)
    assert {held.device for held in cache.tensors} == {META} and cache.size == (4, 48)
    running, call = Running(8, vocab_size=50, device=META), Call()
    call.add(3, "a", [1, 2, 3], SamplingParams(max_new_tokens=4), (1, 2))
    call.rows[0].token_ids, call.rows[0].log_probs = [5], [-1.0]
    running.add(call.rows)
    assert {column.device for column in running._columns.values()} == {META}
    assert uniforms(running.column("key"), running.column("num_new")).device == META


def test_freed_storages_leave_their_views_valid() -> None:
    whole = torch.arange(6.0)
    view, tied = whole[2:4], whole.view(2, 3)
    storages = devices.Storages([whole, view, tied, torch.zeros(3)])
    assert storages.num_bytes == 24 + 12, "a storage counts once"
    storages.release()
    assert storages.released and whole.untyped_storage().nbytes() == 0
    storages.resume()
    assert not storages.released
    whole.copy_(torch.arange(6.0) * 10)
    assert view.tolist() == [20.0, 30.0] and tied[1].tolist() == [30.0, 40.0, 50.0]


def test_on_a_gpu_released_weights_free_their_memory_and_come_back_with_a_push(engine: HFEngine) -> None:
    model, before = engine.model, engine.model.checksums()
    for parameter in model._model.parameters():
        parameter.data = parameter.data.clone()  # memory of a file or of numpy cannot be freed as a GPU's can
    with open_hf(model.folder) as held:
        model.weights = model._named_weights(held)
    model.memory = devices.Storages(model.weights.values())
    pushed = {name: tensor.clone() for name, tensor in model.weights.items()}
    model.device = GPU  # no work runs on it here: torch without CUDA passes over what the orders ask of it
    engine.release([WEIGHTS, CACHE])
    assert {tensor.untyped_storage().nbytes() for tensor in model.weights.values()} == {0}
    assert not engine._may_admit()
    for refused in (model.checksums, model.check_memory):
        with pytest.raises(ValueError, match="the weights are released: expected /resume_memory_occupation first"):
            refused()
    engine.take_back([WEIGHTS])
    assert not engine._may_admit(), "the cache is still released"
    model.device = torch.device("cpu")
    with torch.inference_mode():
        model.load_weights(pushed)
    engine.take_back([CACHE])
    assert engine._may_admit() and model.checksums() == before


def test_the_cache_takes_the_share_of_the_gpu_that_the_weights_leave(
    model: HFModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_token = model.new_cache(1).bytes_per_token
    weights = sum(tensor.nbytes for tensor in model._model.parameters())
    assert model.memory.num_bytes == weights
    assert model.most_tokens(0.5) == model.most_tokens(None), "a CPU has no share"
    monkeypatch.setattr(devices, "total_bytes", lambda device: 2 * (weights + 100 * per_token))
    assert model.most_tokens(0.5) == 100
    with pytest.raises(ValueError, match=r"rollout.memory_fraction=0.25: it leaves no memory for the KV cache"):
        model.most_tokens(0.25)


@pytest.mark.parametrize(("device", "speaks", "other"), [("cpu", "gloo", "nccl"), (GPU, "nccl", "gloo")])
def test_a_server_joins_groups_of_its_device_only(device: Any, speaks: str, other: str) -> None:
    engine: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device(device)))
    where = {"rank_offset": 1, "world_size": 2, "master_address": "127.0.0.1", "master_port": 1}
    with pytest.raises(ValueError, match=f"backend='{other}': this server runs on .* and speaks {speaks}"):
        WeightUpdates(engine, 1.0).init_group({**where, "backend": other})


def test_a_product_into_float32_is_for_16_bits_on_a_gpu() -> None:
    for is_cuda, dtype, expected in ((True, torch.half, True), (True, torch.float, False), (False, torch.half, False)):
        weight: Any = SimpleNamespace(dtype=dtype, is_cuda=is_cuda)
        assert devices.has_float32_product(weight) is expected


@torch.inference_mode()
def test_logits_of_16_bits_are_float32_on_a_gpu(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has the product only there: here it is done in float32 throughout."""
    model = HFModel(model_path, torch.bfloat16)
    hidden = torch.randn(2, 3, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    rounded = model.logits(hidden)
    assert rounded.dtype == torch.bfloat16
    monkeypatch.setattr(torch, "mm", lambda x, y, out_dtype: x.to(out_dtype) @ y.to(out_dtype))
    monkeypatch.setattr(model, "_has_float32_logits", True)
    exact = hidden.float() @ model._head.weight.float().T
    torch.testing.assert_close(model.logits(hidden), exact)
    torch.testing.assert_close(model.logits(hidden[0, 0]), exact[0, 0])
    torch.testing.assert_close(rounded.float(), exact, rtol=1e-2, atol=1e-2)
