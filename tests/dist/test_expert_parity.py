"""Optimizer steps of models with experts under every way of laying these out: the same loss, gradient and weights.

Families with the same experts, and attention of their own, under some of these ways; those with gated delta nets too,
one of which has no experts.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cases import Case, Found, Table
from parity_compare import GRADIENT_TOLERANCE, LOOSER, assert_same_after, assert_same_gradient, assert_same_stats
from safetensors.torch import load_file
from tiny_models import FAMILIES, write_model

from megarl.arch.layout import Layout
from megarl.arch.model_types import SPARSE_LATENT

pytestmark = [pytest.mark.full, pytest.mark.dist]

BIAS = "e_score_correction_bias"
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
SP4 = SP | {"tp": 4}  # two ranks share each of two heads of keys and values
# Of Qwen3-MoE every kind of parallelism beside experts.  DeepSeek-V3 has queries from latents, groups of experts and
# YaRN; the plain one has none of them.
LAYOUTS: dict[str, dict[int, dict[str, Layout]]] = {
    "qwen3_moe": {
        2: {"ep2": Layout(ep=2), "tp2+sp ep2 etp1": Layout(**SP, ep=2, etp=1)},
        4: {
            "pp2 vpp2 ep2": Layout(pp=2, vpp=2, ep=2),
            "cp2 ep4": Layout(cp=2, ep=4),
            "ep2 etp2": Layout(ep=2, etp=2),
        },
        8: {"tp2+sp pp2 vpp2 ep2 etp1": Layout(**SP, pp=2, vpp=2, ep=2, etp=1)},
    },
    "deepseek_v3": {
        2: {"tp2+sp": Layout(**SP), "pp2 uneven": Layout(pp=2, first_stage_layers=3), "cp2": Layout(cp=2)},
        4: {
            "tp2+sp ep4 etp1": Layout(**SP, ep=4, etp=1),
            "tp2+sp cp2 ep2": Layout(**SP, cp=2, ep=2),
            "pp2 vpp2 ep2": Layout(pp=2, vpp=2, ep=2),
        },
    },
    "deepseek_v3_plain": {2: {"tp2+sp": Layout(**SP)}},
    "glm4_moe": {2: {"tp2+sp ep2 etp1": Layout(**SP, ep=2, etp=1)}},
    "minimax_m2": {2: {"tp2+sp": Layout(**SP), "cp2 ep2": Layout(cp=2, ep=2)}},
    "gpt_oss": {
        2: {"tp2+sp ep2 etp1": Layout(**SP, ep=2, etp=1), "pp2": Layout(pp=2), "cp2": Layout(cp=2)},
        4: {"tp4+sp ep4 etp1": Layout(**SP4, ep=4, etp=1)},
    },
    "deepseek_v32": {
        2: {"tp2+sp": Layout(**SP), "pp2": Layout(pp=2), "cp2": Layout(cp=2), "ep2": Layout(ep=2)},
        4: {
            "tp2+sp cp2 ep2": Layout(**SP, cp=2, ep=2),
            "tp2+sp ep4 etp1": Layout(**SP, ep=4, etp=1),
            "pp2 vpp2 ep2": Layout(pp=2, vpp=2, ep=2),
        },
    },
    "glm_moe_dsa": {
        2: {
            "tp2+sp ep2 etp1": Layout(**SP, ep=2, etp=1),
            "pp2 uneven": Layout(pp=2, first_stage_layers=3),  # its third layer cannot begin a stage
            "cp2": Layout(cp=2),
        },
        4: {"tp2+sp cp2": Layout(**SP, cp=2)},
    },
    "qwen3_next": {
        2: {"tp2+sp": Layout(**SP), "pp2": Layout(pp=2), "cp2": Layout(cp=2), "ep2": Layout(ep=2)},
        4: {
            "tp2+sp cp2 ep2": Layout(**SP, cp=2, ep=2),
            "tp2+sp ep4 etp1": Layout(**SP, ep=4, etp=1),
            "pp2 vpp2 ep2": Layout(pp=2, vpp=2, ep=2),
        },
    },
    "qwen3_5_text": {
        2: {
            "tp2": Layout(tp=2),
            "tp2+sp": Layout(**SP),
            "pp2 vpp2": Layout(pp=2, vpp=2),
            "cp2": Layout(cp=2),
        },
        4: {"tp2+sp cp2": Layout(**SP, cp=2), "tp4": Layout(tp=4), "tp4+sp": Layout(**SP4)},
    },
    "qwen3_5_moe_text": {2: {"tp2+sp ep2 etp1": Layout(**SP, ep=2, etp=1), "cp2": Layout(cp=2)}},
    "nemotron_h": {
        2: {"tp2+sp": Layout(**SP), "pp2": Layout(pp=2), "cp2": Layout(cp=2), "ep2": Layout(ep=2)},
        4: {
            "tp2+sp cp2 ep2": Layout(**SP, cp=2, ep=2),
            "tp2+sp ep4 etp1": Layout(**SP, ep=4, etp=1),
            "pp2 vpp2 ep2": Layout(pp=2, vpp=2, ep=2),
        },
    },
    "nemotron_h_latent": {
        2: {"tp2+sp ep2 etp1": Layout(**SP, ep=2, etp=1), "cp2": Layout(cp=2)},
        4: {"tp2+sp cp2": Layout(**SP, cp=2)},
    },
    # Two groups of B and C, which four context-parallel ranks have twice.
    "nemotron_h_dense": {2: {"tp2": Layout(tp=2), "pp2 vpp2": Layout(pp=2, vpp=2)}, 4: {"cp4": Layout(cp=4)}},
}
LAYOUTS = {family: sizes for family, sizes in LAYOUTS.items() if family in FAMILIES}
CRITICS = tuple(
    name for name in ("qwen3_moe/ep2", "qwen3_moe/pp2 vpp2 ep2", "nemotron_h/tp2+sp") if name.split("/")[0] in LAYOUTS
)
NAMES = [f"{family}/{name}" for family, sizes in LAYOUTS.items() for layouts in sizes.values() for name in layouts]
HEADS = ("", "tied ")  # whether the head has weights of its own, as in models of this size, or those of the embedding
MODELS = [head + family for head in HEADS for family in LAYOUTS if not (head and family.startswith("nemotron"))]
ADAM: dict[str, Any] = {"optim": "adamw", "num_steps": 2}
SHARDED = {
    "qwen3_moe": (4, Layout(pp=2, vpp=2, ep=2, use_distributed_optimizer=True)),
    "deepseek_v3": (2, Layout(**SP, ep=2, etp=1, use_distributed_optimizer=True)),
    "gpt_oss": (2, Layout(**SP, ep=2, etp=1, use_distributed_optimizer=True)),
    "deepseek_v32": (2, Layout(**SP, ep=2, etp=1, use_distributed_optimizer=True)),
    "glm_moe_dsa": (2, Layout(use_distributed_optimizer=True)),
    "qwen3_next": (2, Layout(**SP, ep=2, etp=1, use_distributed_optimizer=True)),
    "qwen3_5_text": (2, Layout(use_distributed_optimizer=True)),
    "nemotron_h_latent": (2, Layout(**SP, ep=2, etp=1, use_distributed_optimizer=True)),
    "nemotron_h_dense": (2, Layout(use_distributed_optimizer=True)),
}
SHARDED = {family: case for family, case in SHARDED.items() if family in FAMILIES}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    for model in MODELS:
        write_model(root / model, model.removeprefix("tied "), tied=model.startswith("tied "))
    return root


@pytest.fixture(scope="module")
def found(root: Path) -> Found:
    tables = []
    for family, sizes in LAYOUTS.items():
        alone = {f"{family}/one": Case("actor", num_steps=2), f"{family}/adam": Case("actor", **ADAM)}
        alone[f"{family}/one critic"] = Case("critic", num_steps=2)
        tables.append(with_both_heads(Table(1, str(root / family), alone)))
        for size, layouts in sizes.items():
            cases = {f"{family}/{name}": Case("actor", how, num_steps=2) for name, how in layouts.items()}
            critics = [name for name in CRITICS if name in cases]
            cases |= {f"{name} critic": replace(cases[name], role="critic") for name in critics}
            if size == SHARDED.get(family, (0,))[0]:
                cases[f"{family}/sharded"] = Case("actor", SHARDED[family][1], **ADAM)
            tables.append(with_both_heads(Table(size, str(root / family), cases)))
    return Found(*tables)


def with_both_heads(table: Table) -> Table:
    """The actors of the table also with heads that are tied, on the same ranks; a critic has none."""
    untied = Path(table.folder)
    folder = str(untied.with_name(f"tied {untied.name}"))
    if f"tied {untied.name}" not in MODELS:
        return table
    actors = {name: case for name, case in table.cases.items() if case.role == "actor"}
    tied = {f"tied {name}": replace(case, folder=folder) for name, case in actors.items()}
    return replace(table, cases={**table.cases, **tied})


def trained(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradient without routers' biases and indexers, which have none: exported in a bias's place is the bias."""
    return {name: t for name, t in case["gradient"].items() if not name.endswith(BIAS) and ".indexer." not in name}


@pytest.mark.parametrize(
    "name",
    [
        *(head + name for head in HEADS for name in NAMES if head + name.split("/")[0] in MODELS),
        *(f"{name} critic" for name in CRITICS),
    ],
)
def test_loss_gradient_and_steps_do_not_depend_on_the_layout(found: Found, name: str) -> None:
    one, other = found[f"{name.split('/')[0]}/one{' critic' * name.endswith('critic')}"], found[name]
    expected = trained(one[0])
    still = [name for name, gradient in expected.items() if not gradient.any()]
    assert all(".experts." in name for name in still) and len(still) < 0.2 * len(expected), "of experts without tokens"
    # Of gated delta nets the gradient is up to 48 long, and an expert's is off by 2.4e-5 of its largest entry; steps of
    # 0.05 along it carry this into the norms of the next gradients.
    has_delta_nets = "qwen3_next" in name or "qwen3_5" in name
    assert_same_gradient(trained(other[0]), expected, (2.5 if has_delta_nets else 1.0) * GRADIENT_TOLERANCE)
    assert_same_stats(other, one)
    assert_same_after(other[0], one[0], GRADIENT_TOLERANCE, of_norms=(1e-4 if has_delta_nets else 1e-5) * LOOSER)


@pytest.mark.parametrize("family", [model for model in MODELS if model.removeprefix("tied ") in SHARDED])
def test_steps_of_a_sharded_optimizer_do_not_depend_on_the_layout(found: Found, family: str) -> None:
    sharded, whole = found[f"{family}/sharded"][0], found[f"{family}/adam"][0]
    assert_same_after(sharded, whole, GRADIENT_TOLERANCE, of_norms=1e-4 * LOOSER)


@pytest.mark.parametrize("case", ["one", "sharded", "adam"])
@pytest.mark.megatron_0_19
@pytest.mark.parametrize("family", SPARSE_LATENT)
def test_steps_leave_indexers_as_they_are(found: Found, root: Path, family: str, case: str) -> None:
    """Bit for bit: no loss has a gradient for them, and weight decay does not reach what is not trained."""
    before, after = load_file(root / family / "model.safetensors"), found[f"{family}/{case}"][0]["after"]
    indexers = [name for name in before if ".indexer." in name]
    assert len(indexers) == 5 * {"deepseek_v32": 4, "glm_moe_dsa": 3}[family]
    assert not [name for name in indexers if not torch.equal(after[name], before[name])]
    others = [name for name in before if ".self_attn." in name and name not in indexers]
    assert not [name for name in others if torch.equal(after[name], before[name])]


@pytest.mark.parametrize("case", ["one", "sharded", "pp2 vpp2 ep2"])
def test_steps_move_weights_and_leave_the_routers_biases(found: Found, root: Path, case: str) -> None:
    before, after = load_file(root / "deepseek_v3" / "model.safetensors"), found[f"deepseek_v3/{case}"][0]["after"]
    biases = [name for name in before if name.endswith(BIAS)]
    assert len(biases) == 3
    assert all(bool(before[name].any()) and torch.equal(after[name], before[name]) for name in biases)
    assert not [name for name in before if ".self_attn." in name and torch.equal(after[name], before[name])]
