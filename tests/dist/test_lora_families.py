"""Adapters on experts and on latent attention: every layout against one rank, and one rank against transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_compare import log_probs, per_sequence
from lora_families_cases import ALPHA, RANK, run_checkpoints, run_layouts, write_adapter
from parity_cases import make_step
from parity_compare import GRADIENT_TOLERANCE, assert_same_gradient, relative
from peft import PeftModel
from safetensors.torch import load_file
from spawn import run_ranks
from tiny_models import read_config, write_model
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from megarl.layout import Layout
from megarl.mcore.models.lora import LoraSettings
from megarl.projections import ALL
from megarl.weights.mapping.families import stacks_for
from megarl.weights.mapping.stacks import joined, places

pytestmark = [pytest.mark.slow, pytest.mark.dist]

# An expert that gets few tokens has small gradients, in which roundings weigh more; a missing term is off by about 1.
# It is for routed experts only.
OF_FEW = 5 * GRADIENT_TOLERANCE
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
# Experts distributed, each cut over ranks, both, and neither; dense layers and latent attention cut over ranks.
LAYOUTS: dict[str, dict[int, dict[str, Layout]]] = {
    "qwen3_moe": {
        1: {"one": Layout()},
        2: {
            "ep2": Layout(ep=2),
            "tp2+sp": Layout(**SP),
            "tp2+sp ep2 etp1": Layout(**SP, ep=2, etp=1),
            "ep2 sharded": Layout(ep=2, use_distributed_optimizer=True),
        },
        4: {
            "ep2 etp2": Layout(ep=2, etp=2),
            "tp2+sp ep2": Layout(**SP, ep=2),
            "tp2+sp sharded": Layout(**SP, use_distributed_optimizer=True),
            "pp2 ep2": Layout(pp=2, ep=2),
        },
    },
    "deepseek_v3": {
        1: {"one": Layout()},
        2: {"tp2+sp": Layout(**SP), "ep2": Layout(ep=2), "cp2": Layout(cp=2)},
        4: {"tp2+sp ep2": Layout(**SP, ep=2)},
    },
    "deepseek_v3_plain": {1: {"one": Layout()}, 2: {"tp2+sp": Layout(**SP)}},
    "mixtral": {1: {"one": Layout()}, 2: {"tp2+sp": Layout(**SP), "ep2": Layout(ep=2)}},
    "qwen3_moe_plain": {1: {"one": Layout()}},
    "minimax_m2": {1: {"one": Layout()}, 2: {"tp2+sp": Layout(**SP)}},
    "gpt_oss": {1: {"one": Layout()}, 2: {"tp2+sp ep2 etp1": Layout(**SP, ep=2, etp=1)}},
}
ON = {n: [(f, name, x) for f in LAYOUTS for name, x in LAYOUTS[f].get(n, {}).items()] for n in (1, 2, 4)}
CASES = [f"{family}/{name}" for n in ON for family, name, _ in ON[n]]
OTHERS = [case for case in CASES if not case.endswith("/one")]
LONG = ("deepseek_v3_plain", "mixtral", "qwen3_moe_plain", "minimax_m2", "gpt_oss")


def marked(cases: Iterable[str]) -> list[Any]:
    """Those of some families are long."""
    return [pytest.param(case, marks=pytest.mark.long if case.split("/")[0] in LONG else ()) for case in cases]


CHECKPOINTS = {
    "ep2": ("qwen3_moe", Layout(ep=2), Layout(ep=2), "float32"),
    "ep2 to etp2": ("qwen3_moe", Layout(ep=2), Layout(**SP), "float32"),
    "etp2 to ep2 sharded": ("qwen3_moe", Layout(**SP), Layout(ep=2, use_distributed_optimizer=True), "float32"),
    "latent tp2 to dp2": ("deepseek_v3", Layout(**SP), Layout(), "float32"),
    "latent tp2 bf16": ("deepseek_v3", Layout(**SP), Layout(**SP), "bfloat16"),
}
TARGETS = {"deepseek_v3_plain": ("q_proj", "kv_a_proj_with_mqa", "up_proj")}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for family in LAYOUTS:
        folder = write_model(root / family, family, tied=False)
        write_adapter(folder, root / f"{family} adapter", LoraSettings(RANK, ALPHA, TARGETS.get(family, (ALL,))))
    return root


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def found(root: Path, out: Path) -> dict[str, list[dict[str, Any]]]:
    """family/layout -> what each rank returned."""
    return Answers(root, out)


class Answers(dict[str, list[dict[str, Any]]]):
    """Those of a family are computed when the first of them is asked for."""

    def __init__(self, root: Path, out: Path) -> None:
        self._root, self._out = root, out

    def __missing__(self, wanted: str) -> list[dict[str, Any]]:
        for size, every in ON.items():
            if cases := [case for case in every if case[0] == wanted.split("/")[0]]:
                ranks = run_ranks(size, run_layouts, str(self._root), str(self._out), cases, timeout_s=400)
                self.update({case: [rank[case] for rank in ranks] for case in ranks[0]})
        return dict.__getitem__(self, wanted)


def one_of(case: str) -> str:
    return f"{case.split('/')[0]}/one"


def low_rank(adapter: dict[str, Tensor], weight: str) -> Tensor | None:
    """scaling * B A of a weight by its name in the folder; None: it is not adapted."""
    a, b = (adapter.get(f"base_model.model.{weight.removesuffix('weight')}lora_{x}.weight") for x in "AB")
    return None if a is None or b is None else ALPHA / RANK * b @ a


def _stacked(adapter: dict[str, Tensor], weights: list[str], like: Tensor) -> Tensor:
    """scaling * B A of weights that are on top of each other in one matrix, zeros for one that is not adapted."""
    found = [low_rank(adapter, weight) for weight in weights]
    rows = len(like) // len(weights)
    return torch.cat([like.new_zeros(rows, like.size(1)) if delta is None else delta for delta in found])


def of_stacks(folder: Path, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """scaling * B A of tensors that stack all experts of a layer, by their names in the folder; zeros for biases."""
    config = read_config(folder)
    stacks = stacks_for(config)
    parts = {name: place.stack.part_shape for name, place in places(stacks).items()}
    deltas = {name: low_rank(factors, name) for name in parts}
    whole = ((name, torch.zeros(parts[name]) if delta is None else delta) for name, delta in deltas.items())
    return dict(joined(whole, stacks))


def by_transformers(folder: Path, adapter: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs and gradients of A and B of transformers' model, every weight replaced by W + scaling * B A."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    factors = load_file(adapter / "adapter_model.safetensors")
    for factor in factors.values():
        factor.requires_grad_()
    parts = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
    has_blocks = read_config(folder)["model_type"] in ("mixtral", "minimax_m2")
    if has_blocks:
        parts = {"gate_up": ("w1", "w3"), "down": ("w2",)}
    replaced, stacked = {}, of_stacks(folder, factors)
    for name, param in model.named_parameters():
        own = name.replace(".mlp.", ".block_sparse_moe.") if has_blocks else name
        if own in stacked:
            replaced[name] = param + stacked[own]
        elif found := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", own):  # all experts of a layer in one tensor
            names = [[f"{found[1]}.{e}.{part}.weight" for part in parts[found[2]]] for e in range(len(param))]
            replaced[name] = param + torch.stack([_stacked(factors, own_names, param[0]) for own_names in names])
        elif (delta := low_rank(factors, own)) is not None:
            replaced[name] = param + delta
    batch, columns = make_step(model.config.vocab_size), []
    for ids in batch.split(batch.tokens):
        scores = functional_call(model, replaced, (ids[None],)).logits[0].log_softmax(-1)
        columns.append(torch.cat([torch.zeros(1), scores[:-1].gather(1, ids[1:, None])[:, 0]]))
    (-(batch.columns["weight"] * torch.cat(columns)).sum()).backward()
    return [c.detach() for c in columns], {name: factor.grad for name, factor in factors.items()}  # type: ignore[misc]


def assert_same_gradients(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for of_expert, tolerance in ((False, GRADIENT_TOLERANCE), (True, OF_FEW)):
        if own := {name: tensor for name, tensor in expected.items() if (".experts." in name) is of_expert}:
            assert_same_gradient({name: got[name] for name in own}, own, tolerance)


@pytest.mark.parametrize("family", marked(LAYOUTS))
def test_log_probs_and_gradients_are_those_of_a_dense_model(found: dict, root: Path, family: str) -> None:
    one = found[f"{family}/one"][0]
    columns, gradients = by_transformers(root / family, root / f"{family} adapter")
    got = per_sequence([one], "columns")
    assert max((got[i] - c).abs().max().item() for i, c in enumerate(columns)) < 5e-5
    still = [name for name, gradient in gradients.items() if not gradient.any()]
    assert all(".experts." in name for name in still) and len(still) < 0.2 * len(gradients), "of experts without tokens"
    assert_same_gradients(one["gradients"], gradients)


@pytest.mark.parametrize("case", marked(OTHERS))
def test_gradients_do_not_depend_on_the_layout(found: dict, case: str) -> None:
    expected, got = found[one_of(case)][0], found[case]
    if "sharded" not in case:  # where each rank has the gradient of its own share of the parameters only
        assert_same_gradients(got[0]["gradients"], expected["gradients"])
    for rank in got:
        assert rank["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("case", marked(OTHERS))
def test_log_probs_before_and_after_a_step_do_not_depend_on_the_layout(found: dict, case: str) -> None:
    for key in ("columns", "after"):
        expected, got = per_sequence(found[one_of(case)], key), per_sequence(found[case], key)
        assert sorted(got) == sorted(expected)
        assert max((got[i] - c).abs().max().item() for i, c in expected.items()) < 2e-5


@pytest.mark.parametrize("case", marked(CASES))
def test_an_adapter_is_loaded_bit_for_bit_and_every_layout_starts_with_the_same(
    found: dict, root: Path, case: str
) -> None:
    one, got = found[one_of(case)][0], found[case][0]
    stored = load_file(root / f"{case.split('/')[0]} adapter" / "adapter_model.safetensors")
    assert sorted(got["loaded"]) == sorted(stored)
    assert all(torch.equal(got["loaded"][n], t) for n, t in stored.items())
    assert all(torch.equal(got["initial"][n], t) for n, t in one["initial"].items())
    assert got["identity"] == one["identity"], "its digest counts every expert"


@pytest.mark.parametrize("case", marked(CASES))
def test_merged_weights_are_the_base_with_the_adapter_in_it(found: dict, root: Path, case: str) -> None:
    family = case.split("/")[0]
    got, base = found[case][0]["merged"], load_file(root / family / "model.safetensors")
    adapter, num_adapted = load_file(root / f"{family} adapter" / "adapter_model.safetensors"), 0
    assert sorted(got) == sorted(base)
    stacked = of_stacks(root / family, adapter)
    for name, tensor in base.items():
        delta = stacked[name] if name in stacked else low_rank(adapter, name)
        num_adapted += delta is not None and name not in stacked
        expected = tensor if delta is None else tensor + delta
        torch.testing.assert_close(got[name], expected, rtol=0, atol=0 if delta is None else 1e-6)
    in_stacks = sum(".mlp.experts." in name for name in adapter) if stacked else 0
    assert 2 * num_adapted == len(adapter) - in_stacks


@pytest.mark.parametrize("case", marked(CASES))
def test_a_step_moves_all_adapters_and_no_bit_of_the_base(found: dict, case: str) -> None:
    got = found[case][0]
    assert got["base is the same"] and got["optimized"] and got["moved"]


@pytest.mark.parametrize("case", marked(["qwen3_moe_plain/one", "mixtral/ep2", "mixtral/tp2+sp"]))
def test_peft_loads_what_was_saved_of_experts(found: dict, root: Path, out: Path, case: str) -> None:
    folder = root / case.split("/")[0]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert_peft_says_the_same(found, case, base, out)


@pytest.mark.parametrize("case", ["qwen3_moe/one", "deepseek_v3/one"])
def test_peft_leaves_out_the_adapters_beside_those_of_experts(found: dict, root: Path, out: Path, case: str) -> None:
    """As docs/convert_and_lora.md and a run say; once it does not, they have to change."""
    assert found[case]
    saved = load_file(out / case / "adapter" / "adapter_model.safetensors")
    assert [name for name in saved if ".mlp." in name and ".experts." not in name]
    base = AutoModelForCausalLM.from_pretrained(root / case.split("/")[0], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, out / case / "adapter")
    loaded = [name for name, _ in model.named_parameters() if ".lora_A." in name]
    assert [name for name in loaded if ".self_attn." in name] and [name for name in loaded if ".experts." in name]
    assert not [name for name in loaded if ".mlp." in name and ".experts." not in name]


def assert_peft_says_the_same(found: dict, case: str, base: Any, out: Path) -> None:
    with torch.no_grad():
        of_base = log_probs(base)
        of_adapter = log_probs(PeftModel.from_pretrained(base, out / case / "adapter"))
    expected = per_sequence(found[case], "after")
    for i, column in expected.items():
        torch.testing.assert_close(of_adapter[i], column, rtol=0, atol=2e-5)
    assert max((of_base[i] - column).abs().max() for i, column in expected.items()) > 0.01


@pytest.fixture(scope="module")
def checkpoints(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where = tmp_path_factory.mktemp("resumed")
    return run_ranks(2, run_checkpoints, str(root), str(where), CHECKPOINTS, timeout_s=240)[0]


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(checkpoints: dict, case: str) -> None:
    got, (_, first, then, _) = checkpoints[case], CHECKPOINTS[case]
    scale = max(tensor.abs().max().item() for tensor in got["saved after"].values())
    for name, tensor in got["saved"].items():
        assert torch.equal(got["loaded"][name], tensor), name
        if "lora_A" in name:  # B of an expert that got no token is still zero
            assert not torch.equal(got["other seed"][name], tensor), name
        if first == then:
            assert torch.equal(got["loaded after"][name], got["saved after"][name]), name
        else:
            error = relative(got["loaded after"][name], got["saved after"][name], 1e-2 * scale)
            assert error < OF_FEW, f"{name}: {error:.1e}"
