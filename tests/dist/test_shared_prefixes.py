"""What rows begin with in common is computed once, and nothing else changes: for models, layouts and losses.

Over layouts in float32, as they run; on one rank in float64 too, where no rounding hides an error of the method.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_cases import ARGS, FACTORS, LOSSES
from parity_cases import Case, Found, Table, make_alike_step
from parity_compare import LOOSER, assert_same_after, assert_same_columns, assert_same_gradient, assert_same_stats
from spawn import Ranks
from teacher_cases import student_gradients, teacher_columns
from tiny_models import write_model

from megarl.algo import POLICY_LOSSES
from megarl.arch.layout import Layout
from megarl.mcore.models.execution import ExecutionOptions
from megarl.samples.batch import Batch

pytestmark = pytest.mark.dist

SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
RECOMPUTED = ExecutionOptions(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {"one": Layout()},
    2: {
        "tp2": Layout(tp=2),
        "tp2+sp": Layout(**SP),
        "pp2": Layout(pp=2),
        "pp2 vpp2": Layout(pp=2, vpp=2),
        "dp2": Layout(),
    },
    4: {"tp2+sp pp2": Layout(**SP, pp=2), "pp2 dp2": Layout(pp=2)},
}
ROLES = ("actor", "critic", "actor with reference")
# Experts, latent attention, windows, windows and sinks: on one rank, and with what cuts them.
FAMILIES: dict[str, Layout] = {
    "qwen3_moe": Layout(ep=2),
    "deepseek_v3": Layout(**SP, ep=2, etp=1),
    "mistral": Layout(tp=2),
    "gpt_oss": Layout(**SP, ep=2, etp=1),
}
ALIKE: dict[str, Any] = {"alike": True, "shares_prefixes": True}
IN_FLOAT32 = 1e-5 * LOOSER  # of a gradient, relative
GSPO = Case("actor", max_tokens=80, policy_loss="gspo", policy_args=ARGS.get("gspo", {}), **ALIKE)


def case(role: str, layout: Layout, **more: Any) -> Case:
    return Case(role, layout, max_tokens=40, num_steps=0 if "reference" in role else 3, **ALIKE, **more)


# name: number of ranks, family of the model, and what is computed
CASES: dict[str, tuple[int, str, Case]] = {
    **{
        f"{name}/{role}": (size, "qwen3", case(role, layout))
        for size, layouts in LAYOUTS.items()
        for name, layout in layouts.items()
        for role in ROLES
    },
    "narrowed": (1, "qwen3", case("actor", Layout(), narrowed=True)),
    "recomputed": (1, "qwen3", case("actor", Layout(), engine=RECOMPUTED)),
    "distributed optimizer": (2, "qwen3", case("actor", Layout(use_distributed_optimizer=True), optim="adamw")),
    "fsdp": (2, "qwen3", case("actor", Layout(), optim="adamw", engine=ExecutionOptions("fsdp"))),
    "untied fsdp": (2, "untied", case("actor", Layout(), optim="adamw", engine=ExecutionOptions("fsdp"))),
    "gspo dp2": (2, "qwen3", GSPO),
    "adapters": (1, "qwen3", case("actor", Layout(), lora=True)),
    "adapters dp2": (2, "qwen3", case("actor", Layout(), lora=True)),
    "adapters tp2+sp": (2, "qwen3", case("actor", Layout(**SP), lora=True)),
    "adapters pp2": (2, "qwen3", case("actor", Layout(pp=2), lora=True)),
    "by flex": (2, "qwen3", case("actor", Layout(**SP), by_flex=True)),
    "by flex in stages": (2, "qwen3", case("actor", Layout(pp=2), by_flex=True)),
}
for _family, _layout in FAMILIES.items():
    CASES |= {
        f"{_family} one": (1, _family, case("actor", Layout())),
        f"{_family} critic": (1, _family, case("critic", Layout())),
        f"{_family} adapters": (1, _family, case("actor", Layout(), lora=True)),
        f"{_family} cut": (2, _family, case("actor", _layout)),
        f"{_family} in stages": (2, _family, case("actor", Layout(pp=2))),
    }
FAST = (
    *("one/actor", "tp2+sp/actor", "pp2 vpp2/critic"),
    *("narrowed", "distributed optimizer", "untied fsdp", "gspo dp2", "adapters tp2+sp"),
)


def is_sharded(one: Case) -> bool:
    """No rank has the whole gradient."""
    return one.engine.strategy == "fsdp" or one.layout.use_distributed_optimizer


def apart_of(one: Case) -> Case:
    """With rows apart, on one rank; adapters that are cut are other ones than those of another layout."""
    is_cut = one.lora and one.layout != Layout()
    layout = one.layout if is_cut else Layout()
    return replace(one, layout=layout, engine=ExecutionOptions(), by_flex=False, shares_prefixes=False)


def apart_name(name: str) -> str:
    _, family, one = CASES[name]
    return f"{family} {apart_of(one)}"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    root, tables = tmp_path_factory.mktemp("models"), []
    folders = {
        family: str(write_model(root / family, family, tied=family == "qwen3")) for family in ("qwen3", *FAMILIES)
    }
    folders["untied"] = str(write_model(root / "untied", "qwen3", tied=False))
    for names in (FAST, [name for name in CASES if name not in FAST]):
        together: dict[tuple[int, str], dict[str, Case]] = {}
        for name in names:
            size, family, one = CASES[name]
            apart = apart_of(one)
            together.setdefault((size, family), {})[name] = one
            together.setdefault((1 if apart.layout == Layout() else size, family), {})[apart_name(name)] = apart
        tables += [Table(size, folders[family], own) for (size, family), own in together.items()]
    return Found(*tables)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in CASES])
def test_columns_gradient_statistics_and_steps_are_those_of_rows_apart(found: Found, name: str) -> None:
    one, got, apart = CASES[name][2], found[name], found[apart_name(name)]
    if one.policy_loss is None:  # else its rows are in another order
        # Attention over a tree adds in another order, and gates of experts enlarge the difference.
        assert_same_columns(got, apart, make_alike_step(4).lengths, 1e-5)
    assert_same_stats(got, apart)
    if not is_sharded(one):
        assert_same_gradient(got[0]["gradient"], apart[0]["gradient"], IN_FLOAT32)
    if one.num_steps:
        assert_same_after(got[0], apart[0])
    if one.by_flex:
        assert got[0]["num_places"] % 128 == 0, "rows are padded to whole blocks, and cut over ranks"


def test_there_is_less_to_compute(found: Found) -> None:
    apart = found[apart_name("one/actor")][0]["num_places"]
    assert apart == make_alike_step(4).num_tokens
    assert found["one/actor"][0]["num_places"] < 0.75 * apart
    assert found["one/actor"][0]["num_places"] < found["narrowed"][0]["num_places"] < apart, "only what is not learnt"
    assert sum(rank["num_places"] for rank in found["gspo dp2"]) < found[apart_name("gspo dp2")][0]["num_places"]


EXACT = 1e-10  # some hundred thousand roundings of float64; the worst that was seen is 7e-15
STEPS: dict[str, dict[str, Any]] = {
    **{loss: {"policy_loss": loss, "policy_args": ARGS.get(loss, {})} for loss in LOSSES if loss in POLICY_LOSSES},
    **{mode: {"policy_loss": "ppo", "agg_mode": mode} for mode in FACTORS["mode"] if mode != Case.agg_mode},
}
# Whole models, and of one layer every loss over samples of several rows.
IN_FLOAT64: dict[str, tuple[str, Case]] = {
    **{family: (family, Case("actor with reference", max_tokens=40)) for family in ("qwen3", *FAMILIES)},
    "critic": ("qwen3", Case("critic", max_tokens=40)),
    "adapters": ("qwen3", Case("actor", max_tokens=40, lora=True)),
    **{name: ("small", Case("actor", max_tokens=80, **how)) for name, how in STEPS.items()},
}
FAST_IN_FLOAT64 = ("qwen3", "ppo", "gspo", "prompt-mean-token-mean")


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Both ways of packing, and of whole models also by FlexAttention."""
    root, tables = tmp_path_factory.mktemp("exact"), []
    folders = {family: str(write_model(root / family, family, tied=False)) for family in ("qwen3", *FAMILIES)}
    folders["small"] = str(write_model(root / "small", "qwen3", tied=False, num_hidden_layers=1))
    for names in (FAST_IN_FLOAT64, [name for name in IN_FLOAT64 if name not in FAST_IN_FLOAT64]):
        together: dict[str, dict[str, Case]] = {}
        for name in names:
            family, one = IN_FLOAT64[name]
            one = replace(one, alike=True, exact=True)
            together.setdefault(family, {}).update({f"{name} apart": one, name: replace(one, shares_prefixes=True)})
        tables += [Table(1, folders[family], own) for family, own in together.items()]
    for family in ("qwen3", *FAMILIES):
        by_flex = replace(IN_FLOAT64[family][1], alike=True, exact=True, shares_prefixes=True, by_flex=True)
        tables.append(Table(1, folders[family], {f"{family} by flex": by_flex}))
    return Found(*tables)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=() if name in FAST_IN_FLOAT64 else pytest.mark.full) for name in IN_FLOAT64),
        *(pytest.param(f"{family} by flex", marks=pytest.mark.full) for family in ("qwen3", *FAMILIES)),
    ],
)
def test_in_float64_all_agrees_to_its_rounding(exact: Found, name: str) -> None:
    """Angles of positions are float32 in Megatron, the same for both; routers are told to take float64.

    By flex: torch's own definition of FlexAttention; its kernels are in tests/gpu/test_flex_tree_gpu.py.
    """
    got, apart = exact[name], exact[f"{name.removesuffix(' by flex')} apart"]
    assert {gradient.dtype for gradient in apart[0]["gradient"].values()} == {torch.float64}
    if name.endswith(" by flex"):
        assert got[0]["num_places"] % 128 == 0, "whole blocks"
    else:
        assert got[0]["num_places"] < (1 if name in STEPS else 0.75) * apart[0]["num_places"]
    if name not in STEPS:  # whose rows are in another order
        assert_same_columns(got, apart, make_alike_step(4).lengths, EXACT)
    assert_same_gradient(got[0]["gradient"], apart[0]["gradient"], EXACT)
    assert_same_stats(got, apart)


def taught(top_k: bool) -> Batch:
    """What two teachers say of each token, which differs where rows are equal, too."""
    g, batch = torch.Generator().manual_seed(9), make_alike_step(45)
    num, teacher = batch.num_tokens, 1 + torch.arange(len(batch.lengths))[batch.row_ids] % 2
    said = {"teacher": teacher, "distill_weight": torch.ones(num), "teacher_hidden": torch.randn(num, 48, generator=g)}
    if top_k:
        logits = torch.randn(num, 45, generator=g).log_softmax(-1).topk(6)
        said |= {"teacher_ids": logits.indices.int(), "teacher_top_log_probs": logits.values}
    return batch.with_columns(**said)


def test_so_are_a_teachers_hidden_states_and_likeliest_tokens(one_rank: Ranks, tmp_path: Path) -> None:
    """The tokens' log-probs: which token is the sixth may be a matter of rounding."""
    folder, batch = str(write_model(tmp_path / "teacher", "qwen3", tied=False)), make_alike_step(45)
    told = []
    for shares in (False, True):
        ((indices, columns),) = one_rank.run(teacher_columns, folder, batch, {"one": Layout()}, 6, shares)[0]["one"]
        told.append([{"indices": indices, "columns": {n: columns[n] for n in ("hidden_states", "top_log_probs")}}])
    assert_same_columns(told[1], told[0], batch.lengths, 1e-5)


@pytest.mark.parametrize("top_k", [False, True], ids=["hidden states", "likeliest tokens"])
def test_students_of_teachers_over_the_vocabulary_share_what_they_do_not_learn(
    one_rank: Ranks, tmp_path: Path, *, top_k: bool
) -> None:
    shapes: dict[str, dict[str, Any]] = {"student": {}, "first": {"hidden_size": 48}, "second": {"hidden_size": 16}}
    folders = [str(write_model(tmp_path / name, "qwen3", tied=False, **more)) for name, more in shapes.items()]
    what = (folders[0], folders[1:], taught(top_k), {"one": (Layout(), "reverse_kl")}, top_k, None)
    apart, got = (one_rank.run(student_gradients, *what, shares)[0]["one"] for shares in (False, True))
    assert got["num_places"] < apart["num_places"]
    assert_same_gradient(got["gradient"], apart["gradient"])
    assert_same_stats([got], [apart])
