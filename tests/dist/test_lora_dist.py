"""LoRA under every layout against one rank, and one rank against transformers: dense, experts, latent attention."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_cases import run_checkpoints, run_layouts
from parity_cases import make_step
from parity_compare import GRADIENT_TOLERANCE, assert_same_columns, assert_same_gradient, by_row, relative
from peft import LoraConfig, PeftModel, get_peft_model
from rank_answers import Answers
from safetensors.torch import load_file, save_file
from spawn import Ranks, run_ranks
from tiny_models import read_config, write_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from megarl.arch.layout import Layout
from megarl.arch.projections import ALL, projections_of
from megarl.hf_server.hub_names import hub_tensors
from megarl.mcore.models.lora import LoraSettings
from megarl.weights.hf.adapter import adapter_table, module_names, peft_config
from megarl.weights.mapping.families import stacks_for
from megarl.weights.mapping.stacks import joined, places

pytestmark = [pytest.mark.full, pytest.mark.dist]

RANK, ALPHA = 4, 10.0
# An expert that gets few tokens has small gradients, in which roundings weigh more; a missing term is off by about 1.
# It is for routed experts only.
OF_FEW = 5 * GRADIENT_TOLERANCE
LENGTHS = make_step(4).lengths
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
BY_PEFT = ("qwen2", "qwen3")  # whose adapters are of peft's own making
# Adapters on some projections only, by the model's name.
TARGETS = {
    "qwen3 partial": ("q_proj", "v_proj", "up_proj"),
    "deepseek_v3_plain": ("q_proj", "kv_a_proj_with_mqa", "up_proj"),
}
# Experts distributed, each cut over ranks, both, and neither; dense layers and latent attention cut over ranks.
LAYOUTS: dict[str, dict[int, dict[str, Layout]]] = {
    "qwen2": {},
    "qwen3": {
        2: {
            "tp2": Layout(tp=2),
            "tp2+sp": Layout(**SP),
            "pp2 vpp2": Layout(pp=2, vpp=2),
            "cp2": Layout(cp=2),
            "dp2 sharded": Layout(use_distributed_optimizer=True),
        },
        4: {"tp2 pp2": Layout(tp=2, pp=2), "tp2+sp cp2": Layout(**SP, cp=2)},
    },
    "qwen3 partial": {2: {"tp2+sp": Layout(**SP), "pp2 vpp2": Layout(pp=2, vpp=2)}},
    "qwen3_moe": {
        2: {
            "ep2": Layout(ep=2),
            "tp2+sp": Layout(**SP),
            "tp2+sp ep2 etp1": Layout(**SP, ep=2, etp=1),
            "ep2 sharded": Layout(ep=2, use_distributed_optimizer=True),
        },
        4: {
            "ep2 etp2": Layout(ep=2, etp=2),
            "tp2+sp sharded": Layout(**SP, use_distributed_optimizer=True),
            "pp2 ep2": Layout(pp=2, ep=2),
        },
    },
    "deepseek_v3": {2: {"tp2+sp": Layout(**SP), "cp2": Layout(cp=2)}, 4: {"tp2+sp ep2": Layout(**SP, ep=2)}},
    "deepseek_v3_plain": {2: {"tp2+sp": Layout(**SP)}},
    "mixtral": {2: {"tp2+sp": Layout(**SP), "ep2": Layout(ep=2)}},
    "minimax_m2": {2: {"tp2+sp": Layout(**SP)}},
    "gpt_oss": {2: {"tp2+sp ep2 etp1": Layout(**SP, ep=2, etp=1)}},
}
OTHERS = [f"{model}/{name}" for model, sizes in LAYOUTS.items() for layouts in sizes.values() for name in layouts]
CASES = [*(f"{model}/one" for model in LAYOUTS), *OTHERS]
SHARDED = Layout(use_distributed_optimizer=True)
CHECKPOINTS = {
    "tp2": ("qwen3", Layout(tp=2), Layout(tp=2), "float32"),
    "tp2 to pp2 vpp2": ("qwen3", Layout(tp=2), Layout(pp=2, vpp=2), "float32"),
    "pp2 vpp2 to pp2": ("qwen3", Layout(pp=2, vpp=2), Layout(pp=2), "float32"),
    "pp2 to dp2 sharded": ("qwen3", Layout(pp=2, use_distributed_optimizer=True), SHARDED, "float32"),
    "bf16 sharded": ("qwen3", SHARDED, SHARDED, "bfloat16"),
    "ep2 to etp2": ("qwen3_moe", Layout(ep=2), Layout(**SP), "float32"),
    "etp2 to ep2 sharded": ("qwen3_moe", Layout(**SP), Layout(ep=2, use_distributed_optimizer=True), "float32"),
    "latent tp2 to dp2": ("deepseek_v3", Layout(**SP), Layout(), "float32"),
    "latent tp2 bf16": ("deepseek_v3", Layout(**SP), Layout(**SP), "bfloat16"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model(root / "other", "qwen3", tied=True, seed=2)
    for model in LAYOUTS:
        family = model.split()[0]
        folder, adapter = write_model(root / model, family, tied=family == "qwen3"), root / f"{model} adapter"
        if model in BY_PEFT:
            write_adapter_by_peft(folder, adapter)
        else:
            write_adapter(folder, adapter, LoraSettings(RANK, ALPHA, TARGETS.get(model, (ALL,))))
    return root


def write_adapter_by_peft(folder: Path, out: Path) -> None:
    """Neither A nor B zero, and the same numbers every time."""
    config = LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules=list(projections_of({})))
    model, generator = get_peft_model(base_model(folder), config), torch.Generator().manual_seed(2)
    for name, param in sorted(model.named_parameters()):
        if param.requires_grad:
            torch.nn.init.normal_(param, std=0.2 if "lora_A" in name else 0.1, generator=generator)
    model.save_pretrained(out)


def write_adapter(folder: Path, out: Path, settings: LoraSettings) -> None:
    """The same in PEFT's format, of any projections."""
    hf, generator = read_config(folder), torch.Generator().manual_seed(2)
    tensors = {
        name: (0.2 if "lora_A" in name else 0.1) * torch.randn(shape, generator=generator)
        for op in adapter_table(hf, settings)
        for name, shape in op.hf_shapes.items()
    }
    out.mkdir()
    save_file(tensors, out / "adapter_model.safetensors", {"format": "pt"})
    config = peft_config(settings, str(folder), list(module_names(hf, settings)))
    (out / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def found(root: Path, out: Path) -> Answers:
    """model/layout -> what each rank returned."""
    groups = [
        (size, {f"{model}/{name}": layout for name, layout in layouts.items()})
        for model, sizes in LAYOUTS.items()
        for size, layouts in {1: {"one": Layout()}, **sizes}.items()
    ]
    run = partial(run_ranks, timeout_s=400)
    return Answers(*((cases, partial(run, size, run_layouts, str(root), str(out), cases)) for size, cases in groups))


def one_of(case: str) -> str:
    return f"{case.split('/')[0]}/one"


def base_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def log_probs(model: Any) -> list[Tensor]:
    """Of each sequence of the step, 0 for its first token."""
    batch, found = make_step(model.config.vocab_size), []
    for ids in batch.split(batch.tokens):
        scores = model(ids[None]).logits[0].log_softmax(-1)
        found.append(torch.cat([torch.zeros(1), scores[:-1].gather(1, ids[1:, None])[:, 0]]))
    return found


def adapter_of(root: Path, case: str) -> dict[str, Tensor]:
    return load_file(root / f"{case.split('/')[0]} adapter" / "adapter_model.safetensors")


def low_rank(adapter: dict[str, Tensor], weight: str) -> Tensor | None:
    """scaling * B A of a weight by its name in the folder; None: it is not adapted."""
    a, b = (adapter.get(f"base_model.model.{weight.removesuffix('weight')}lora_{x}.weight") for x in "AB")
    return None if a is None or b is None else ALPHA / RANK * b @ a


def of_stacks(folder: Path, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """scaling * B A of tensors that stack all experts of a layer, by their names in the folder; zeros for biases."""
    stacks = stacks_for(read_config(folder))
    parts = {name: place.stack.part_shape for name, place in places(stacks).items()}
    deltas = {name: low_rank(factors, name) for name in parts}
    whole = ((name, torch.zeros(parts[name]) if delta is None else delta) for name, delta in deltas.items())
    return dict(joined(whole, stacks))


def by_transformers(folder: Path, factors: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs and gradients of A and B of transformers' model, every weight replaced by W + scaling * B A."""
    model, kind = base_model(folder), read_config(folder)["model_type"]
    for factor in factors.values():
        factor.requires_grad_()
    deltas = {name: delta for name, delta in of_stacks(folder, factors).items() if delta.requires_grad}  # no biases
    with torch.no_grad():
        weights = hub_tensors(model, kind)  # views where transformers stacks experts
    deltas |= {name: delta for name in weights if (delta := low_rank(factors, name)) is not None}
    for name, delta in deltas.items():
        weights[name].data.add_(delta.detach())
    columns, weight = log_probs(model), make_step(model.config.vocab_size).columns["weight"]
    (-(weight * torch.cat(columns)).sum()).backward()
    for param in model.parameters():
        param.data = torch.zeros_like(param) if param.grad is None else param.grad
    gradients = hub_tensors(model, kind)
    torch.autograd.backward(list(deltas.values()), [gradients[name].detach() for name in deltas])
    return [c.detach() for c in columns], {name: factor.grad for name, factor in factors.items()}  # type: ignore[misc]


def assert_same_gradients(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for of_expert, tolerance in ((False, GRADIENT_TOLERANCE), (True, OF_FEW)):
        if own := {name: tensor for name, tensor in expected.items() if (".experts." in name) is of_expert}:
            assert_same_gradient({name: got[name] for name in own}, own, tolerance)


@pytest.mark.parametrize("model", LAYOUTS)
def test_log_probs_and_gradients_are_those_of_a_dense_model(found: Answers, root: Path, model: str) -> None:
    one = found[f"{model}/one"]
    columns, gradients = by_transformers(root / model, adapter_of(root, model))
    got = by_row(one, "before", LENGTHS)
    assert max((got[i] - c).abs().max().item() for i, c in enumerate(columns)) < 5e-5
    still = [name for name, gradient in gradients.items() if not gradient.any()]
    assert all(".experts." in name for name in still) and len(still) < 0.2 * len(gradients), "of experts without tokens"
    assert_same_gradients(one[0]["gradients"], gradients)


@pytest.mark.parametrize("case", OTHERS)
def test_log_probs_gradients_and_a_step_do_not_depend_on_the_layout(found: Answers, case: str) -> None:
    expected, got = found[one_of(case)], found[case]
    # Adam divides each entry of a gradient by its own size at first: rounding of a tiny one becomes a whole step.
    assert_same_columns(got, expected, LENGTHS, of_after=5e-5)
    if "sharded" not in case:  # where each rank has the gradient of its own share of the parameters only
        gradients, wanted = got[0]["gradients"], expected[0]["gradients"]
        assert_same_gradients(gradients, wanted)
        if case.startswith("qwen3/"):  # without experts all are closer
            largest = max(gradient.abs().max() for gradient in wanted.values())
            assert all((gradients[name] - gradient).abs().max() < 5e-6 * largest for name, gradient in wanted.items())
    for rank in got:
        assert rank["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_is_loaded_bit_for_bit_and_every_layout_starts_with_the_same(
    found: Answers, root: Path, case: str
) -> None:
    one, got, stored = found[one_of(case)][0], found[case][0], adapter_of(root, case)
    assert sorted(got["loaded"]) == sorted(stored)
    assert all(torch.equal(got["loaded"][n], t) for n, t in stored.items())
    assert got["identity"] == one["identity"], "its digest counts every expert"
    for name, tensor in one["initial"].items():
        assert torch.equal(got["initial"][name], tensor)
        bound = tensor.shape[1] ** -0.5
        assert not tensor.any() if "lora_B" in name else 0.8 * bound < tensor.abs().max() <= bound


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_the_base_with_the_adapter_in_it(found: Answers, root: Path, case: str) -> None:
    folder, adapter, num_adapted = root / case.split("/")[0], adapter_of(root, case), 0
    got, base = found[case][0]["merged"], load_file(folder / "model.safetensors")
    assert sorted(got) == sorted(base)
    stacked = of_stacks(folder, adapter)
    for name, tensor in base.items():
        delta = stacked[name] if name in stacked else low_rank(adapter, name)
        num_adapted += delta is not None and name not in stacked
        expected = tensor if delta is None else tensor + delta
        torch.testing.assert_close(got[name], expected, rtol=0, atol=0 if delta is None else 1e-6)
    in_stacks = sum(".mlp.experts." in name for name in adapter) if stacked else 0
    assert 2 * num_adapted == len(adapter) - in_stacks


@pytest.mark.parametrize("case", CASES)
def test_a_step_moves_all_adapters_no_bit_of_the_base_and_the_loss(found: Answers, case: str) -> None:
    got, batch = found[case][0], make_step(4)
    assert got["base is the same"] and got["moved"]
    assert got["optimized"], "buffers for gradients are those of the adapters"
    weights = batch.split(batch.columns["weight"])
    before, after = (
        -sum((weights[row] * column).sum() for row, column in by_row(found[case], name, LENGTHS).items())
        for name in ("before", "after")
    )
    assert after < before - 0.01


@pytest.mark.parametrize("case", ["qwen3/one", "qwen3/tp2+sp cp2", "qwen3/tp2 pp2", "mixtral/ep2", "mixtral/tp2+sp"])
@torch.no_grad()
def test_saved_adapters_and_merged_folders_say_what_the_model_says(
    found: Answers, root: Path, out: Path, case: str
) -> None:
    expected, folder = by_row(found[case], "after", LENGTHS), root / case.split("/")[0]
    of_adapter = log_probs(PeftModel.from_pretrained(base_model(folder), out / case / "adapter"))
    of_merged, of_base = log_probs(base_model(out / case / "merged")), log_probs(base_model(folder))
    for row, column in expected.items():
        torch.testing.assert_close(of_adapter[row], column, rtol=0, atol=2e-5)
        torch.testing.assert_close(of_merged[row], column, rtol=0, atol=2e-5)
    assert max((of_base[row] - column).abs().max() for row, column in expected.items()) > 0.01


@pytest.mark.parametrize("case", ["qwen3_moe/one", "deepseek_v3/one"])
def test_peft_leaves_out_the_adapters_beside_those_of_experts(found: Answers, root: Path, out: Path, case: str) -> None:
    """As docs/convert_and_lora.md and a run say; once it does not, they have to change."""
    assert found[case]
    saved = load_file(out / case / "adapter" / "adapter_model.safetensors")
    assert [name for name in saved if ".mlp." in name and ".experts." not in name]
    model = PeftModel.from_pretrained(base_model(root / case.split("/")[0]), out / case / "adapter")
    loaded = [name for name, _ in model.named_parameters() if ".lora_A." in name]
    assert [name for name in loaded if ".self_attn." in name] and [name for name in loaded if ".experts." in name]
    assert not [name for name in loaded if ".mlp." in name and ".experts." not in name]


@pytest.fixture(scope="module")
def checkpoints(two_ranks: Ranks, root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where = tmp_path_factory.mktemp("resumed")
    return two_ranks.run(run_checkpoints, str(root), str(where), CHECKPOINTS, timeout_s=240)[0]


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(checkpoints: dict[str, Any], case: str) -> None:
    got, (model, first, then, _) = checkpoints[case], CHECKPOINTS[case]
    assert got["step_index"] == 2
    scale = 1e-2 * max(tensor.abs().max().item() for tensor in got["saved after"].values())
    for name, tensor in got["saved"].items():
        assert torch.equal(got["loaded"][name], tensor), name
        if model == "qwen3" or "lora_A" in name:  # B of an expert that got no token is still zero
            assert not torch.equal(got["other seed"][name], tensor), name
        if first == then:
            assert torch.equal(got["loaded after"][name], got["saved after"][name]), name
            continue
        # Another layout sums gradients in another order, and B is nothing but a sum of these.
        error = relative(got["loaded after"][name], got["saved after"][name], scale)
        assert error < (GRADIENT_TOLERANCE if model == "qwen3" else OF_FEW), f"{name}: {error:.1e}"
        if model == "qwen3":
            assert relative(got["saved"][name], got["saved after"][name], scale) > 100 * GRADIENT_TOLERANCE


def test_a_checkpoint_of_other_adapters_or_of_another_base_is_refused(checkpoints: dict[str, Any]) -> None:
    found = checkpoints["refused"]
    assert found["rank"].endswith("it was saved with lora.rank 4, this model has 2; expected the same")
    assert "it was saved with lora.targets ['q_proj', 'k_proj'" in found["targets"]
    assert "it was saved with a base model with digest " in found["base"]
    assert found["none"].endswith("it was saved with lora.rank 4, this model has None; expected the same")
