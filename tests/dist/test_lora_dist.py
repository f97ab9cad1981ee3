"""LoRA on gloo ranks against one rank, and against peft on transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lora_cases import all_checkpoints, all_layouts
from lora_compare import log_probs, per_sequence
from parity_cases import make_step
from parity_compare import GRADIENT_TOLERANCE, relative
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from spawn import Ranks, run_ranks
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from megarl.data.examples.tiny import write_tiny_model
from megarl.layout import Layout
from megarl.projections import projections_of

pytestmark = [pytest.mark.slow, pytest.mark.dist]

SHAPE = {"hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}
RANK, ALPHA = 4, 10
TARGETS = list(projections_of({}))
ON_TWO = {
    "tp2": Layout(tp=2),
    "tp2+sp": Layout(tp=2, sequence_parallel=True),
    "pp2": Layout(pp=2),
    "pp2 vpp2": Layout(pp=2, vpp=2),
    "dp2": Layout(),
    "cp2": Layout(cp=2),
    "dp2 sharded": Layout(use_distributed_optimizer=True),
}
ON_FOUR = {
    "tp2pp2": Layout(tp=2, pp=2),
    "tp2dp2": Layout(tp=2),
    "tp2cp2+sp": Layout(tp=2, cp=2, sequence_parallel=True),
}
LAYOUTS = [*ON_TWO, *ON_FOUR]
CHECKPOINTS = {
    "tp2": (Layout(tp=2), Layout(tp=2), "float32"),
    "tp2 to pp2": (Layout(tp=2), Layout(pp=2), "float32"),
    "tp2 to pp2 vpp2": (Layout(tp=2), Layout(pp=2, vpp=2), "float32"),
    "pp2 vpp2 to pp2": (Layout(pp=2, vpp=2), Layout(pp=2), "float32"),
    "pp2 to dp2 sharded": (
        Layout(pp=2, use_distributed_optimizer=True), Layout(use_distributed_optimizer=True), "float32",
    ),
    "dp2 sharded": (Layout(use_distributed_optimizer=True), Layout(use_distributed_optimizer=True), "float32"),
    "bf16": (Layout(tp=2), Layout(tp=2), "bfloat16"),
    "bf16 sharded": (Layout(use_distributed_optimizer=True), Layout(use_distributed_optimizer=True), "bfloat16"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "qwen3", seed=1, **SHAPE)


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Path:
    return write_adapter(folder)


def write_adapter(folder: Path) -> Path:
    """An adapter of peft's own making, neither A nor B zero, and the same numbers every time."""
    model = get_peft_model(base_model(folder), LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS))
    generator = torch.Generator().manual_seed(2)
    for name, param in sorted(model.named_parameters()):
        if param.requires_grad:
            torch.nn.init.normal_(param, std=0.2 if "lora_A" in name else 0.1, generator=generator)
    model.save_pretrained(folder.parent / "adapter")
    return folder.parent / "adapter"


@pytest.fixture(scope="module")
def alone(folder: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("alone")
    found = run_ranks(1, all_layouts, str(folder), str(adapter), str(out), {"one": Layout()}, timeout_s=120)[0]
    return found | {"out": out / "one"}


@pytest.fixture(scope="module")
def on_ranks(folder: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """layout -> what each rank returned."""
    out, by_layout = tmp_path_factory.mktemp("ranks"), dict[str, list[dict[str, Any]]]()
    for size, layouts in ((2, ON_TWO), (4, ON_FOUR)):
        ranks = run_ranks(size, all_layouts, str(folder), str(adapter), str(out), layouts, timeout_s=240)
        by_layout |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return by_layout


def base_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def relative_error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest over the tensors, each relative to its largest entry."""
    assert sorted(got) == sorted(expected)
    return max(((got[n] - t).abs().max() / t.abs().max()).item() for n, t in expected.items())


def by_peft(folder: Path, adapter: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs and gradients of the same loss on transformers' model in peft's wrapper."""
    model = PeftModel.from_pretrained(base_model(folder), adapter, is_trainable=True)
    columns = log_probs(model)
    weight = make_step(model.config.vocab_size).columns["weight"]
    (-(weight * torch.cat(columns)).sum()).backward()
    gradients = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return [c.detach() for c in columns], gradients


def assert_as_by_peft(found: dict[str, Any], folder: Path, adapter: Path) -> None:
    columns, gradients = by_peft(folder, adapter)
    got = per_sequence([found], "columns")
    assert max((got[i] - c).abs().max().item() for i, c in enumerate(columns)) < 1e-5
    assert relative_error(found["gradients"], gradients) < 1e-5


def test_log_probs_and_gradients_are_pefts(alone: dict, folder: Path, adapter: Path) -> None:
    assert_as_by_peft(alone["one"], folder, adapter)


def test_a_model_with_biases_does_what_pefts_does(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "qwen2", seed=1, family="qwen2", **SHAPE)
    adapter = write_adapter(folder)
    found = run_ranks(1, all_layouts, str(folder), str(adapter), str(tmp_path), {"one": Layout()}, timeout_s=120)[0]
    assert_as_by_peft(found["one"], folder, adapter)


def test_an_adapter_of_pefts_is_loaded_bit_for_bit(alone: dict, on_ranks: dict, adapter: Path) -> None:
    expected = load_file(adapter / "adapter_model.safetensors")
    for found in (alone["one"], *(on_ranks[name][0] for name in LAYOUTS)):
        assert sorted(found["loaded"]) == sorted(expected)
        assert all(torch.equal(found["loaded"][n], t) for n, t in expected.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_do_not_depend_on_the_layout(alone: dict, on_ranks: dict, layout: str) -> None:
    expected, got = alone["one"], on_ranks[layout]
    if layout != "dp2 sharded":  # where each rank has the gradient of its own share of the parameters only
        scale = max(gradient.abs().max() for gradient in expected["gradients"].values())
        for name, gradient in expected["gradients"].items():
            assert (got[0]["gradients"][name] - gradient).abs().max() / scale < 5e-6, name
        assert relative_error(got[0]["gradients"], expected["gradients"]) < 1e-5
    for rank in got:
        assert rank["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_do_not_depend_on_the_layout(alone: dict, on_ranks: dict, layout: str) -> None:
    for key, tolerance in (("columns", 5e-6), ("after", 1e-5)):
        expected, got = per_sequence([alone["one"]], key), per_sequence(on_ranks[layout], key)
        assert sorted(got) == sorted(expected)
        assert max((got[i] - c).abs().max().item() for i, c in expected.items()) < tolerance


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_starts_with_the_same_adapters(alone: dict, on_ranks: dict, layout: str) -> None:
    expected, got = alone["one"]["initial"], on_ranks[layout][0]["initial"]
    assert all(torch.equal(got[n], t) for n, t in expected.items())
    assert on_ranks[layout][0]["identity"] == alone["one"]["identity"]
    for name, tensor in expected.items():
        bound = tensor.shape[1] ** -0.5
        assert not tensor.any() if "lora_B" in name else 0.8 * bound < tensor.abs().max() <= bound


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_moves_all_adapters_and_no_bit_of_the_base(on_ranks: dict, layout: str) -> None:
    found = on_ranks[layout][0]
    assert found["base is the same"]
    assert found["optimized"], "buffers for gradients are those of the adapters"
    assert found["moved"]


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_a_step_lowers_the_loss(alone: dict, on_ranks: dict, layout: str) -> None:
    batch, ranks = make_step(4), [alone["one"]] if layout == "one" else on_ranks[layout]
    before, after = (
        -sum((w * per_sequence(ranks, key)[i]).sum() for i, w in enumerate(batch.split(batch.columns["weight"])))
        for key in ("columns", "after")
    )
    assert after < before - 0.01


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_merged_weights_are_the_base_with_the_adapter_in_it(
    alone: dict, on_ranks: dict, folder: Path, adapter: Path, layout: str
) -> None:
    got = (alone["one"] if layout == "one" else on_ranks[layout][0])["merged"]
    base, low = load_file(folder / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    assert sorted(got) == sorted(base)
    for name, tensor in base.items():
        a = low.get(f"base_model.model.{name.removesuffix('weight')}lora_A.weight")
        b = low.get(f"base_model.model.{name.removesuffix('weight')}lora_B.weight")
        expected = tensor if a is None or b is None else tensor + ALPHA / RANK * b @ a
        torch.testing.assert_close(got[name], expected, rtol=0, atol=1e-6 if a is not None else 0)


@pytest.mark.parametrize("layout", ["one partial", *(f"{name} partial" for name in LAYOUTS)])
def test_projections_that_are_no_targets_stay_the_base(alone: dict, on_ranks: dict, folder: Path, layout: str) -> None:
    got = alone[layout] if layout in alone else on_ranks[layout][0]
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.split(".")[-2] in ("q_proj", "v_proj", "up_proj") and name.endswith("weight"):
            a = got[f"base_model.model.{name.removesuffix('weight')}lora_A.weight"]
            row = 3 / 2 * 0.5 * a.sum(0)  # every row of B A, as all of B is 0.5
            torch.testing.assert_close(got[name], tensor + row, rtol=0, atol=1e-6)
        else:
            assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "tp2cp2+sp"])
def test_saved_adapters_and_merged_folders_say_what_the_model_says(
    alone: dict, on_ranks: dict, folder: Path, tmp_path_factory: pytest.TempPathFactory, layout: str
) -> None:
    out = alone["out"] if layout == "one" else tmp_path_factory.getbasetemp().glob(f"ranks*/{layout}/merged")
    out = out if isinstance(out, Path) else max(out, key=lambda path: path.stat().st_mtime).parent
    expected = per_sequence([alone["one"]] if layout == "one" else on_ranks[layout], "after")
    with torch.no_grad():
        of_adapter = log_probs(PeftModel.from_pretrained(base_model(folder), out / "adapter"))
        of_merged = log_probs(base_model(out / "merged"))
        of_base = log_probs(base_model(folder))
    for i, column in expected.items():
        torch.testing.assert_close(of_adapter[i], column, rtol=0, atol=2e-5)
        torch.testing.assert_close(of_merged[i], column, rtol=0, atol=2e-5)
    assert max((of_base[i] - column).abs().max() for i, column in expected.items()) > 0.01


@pytest.fixture(scope="module")
def checkpoints(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where = tmp_path_factory.mktemp("resumed")
    folder, other = (write_tiny_model(where / f"model{seed}", seed=seed, **SHAPE) for seed in (1, 2))
    return two_ranks.run(all_checkpoints, str(folder), str(other), str(where), CHECKPOINTS, timeout_s=120)[0]


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(checkpoints: dict, case: str) -> None:
    found, (first, then, _) = checkpoints[case], CHECKPOINTS[case]
    assert found["step_index"] == 2
    scale = max(tensor.abs().max().item() for tensor in found["saved after"].values())
    for name, tensor in found["saved"].items():
        assert torch.equal(found["loaded"][name], tensor), name
        assert not torch.equal(found["other seed"][name], tensor), name
        if first == then:
            assert torch.equal(found["loaded after"][name], found["saved after"][name]), name
        else:  # another layout sums gradients in another order, and B is nothing but a sum of these
            error = relative(found["loaded after"][name], found["saved after"][name], 1e-2 * scale)
            assert error < GRADIENT_TOLERANCE, f"{name}: {error:.1e}"
            assert relative(found["saved"][name], found["saved after"][name], 1e-2 * scale) > 100 * GRADIENT_TOLERANCE


def test_a_checkpoint_of_other_adapters_or_of_another_base_is_refused(checkpoints: dict) -> None:
    found = checkpoints["refused"]
    assert found["rank"].endswith("it was saved with lora.rank 4, this model has 2; expected the same")
    assert "it was saved with lora.targets ['q_proj', 'k_proj'" in found["targets"]
    assert "it was saved with a base model with digest " in found["base"]
    assert found["none"].endswith("it was saved with lora.rank 4, this model has None; expected the same")
