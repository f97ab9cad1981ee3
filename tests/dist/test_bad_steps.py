"""An optimizer step with a bad number is not made: on every rank nothing changes, whichever rank has the number.

Each case takes a good step, the bad ones, and a good one; the weights are then those of two good steps alone, bit for
bit, which are taken in a case without a bad step.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_step_cases import ADAPTER, COPIED, EXPERT, LAST_RANK_ALONE, SPLIT, Bad, agreements, bad_weights, run_all
from engine_cases import Case
from spawn import Ranks

from megarl.data.examples.tiny import write_tiny_model
from megarl.layout import Layout
from megarl.mcore.training.execution import ExecutionOptions
from megarl.mcore.training.gradient_check import Limits

pytestmark = pytest.mark.dist
SHARDED = Layout(use_distributed_optimizer=True)
SAMPLE, NO_LIMIT = Bad("advantages"), Limits()
ALONE = [SAMPLE, Bad(LAST_RANK_ALONE + SPLIT), Bad("limits", Limits(grad_norm=1e-9)), Bad("limits", Limits(loss=-1e9))]
OVERLAP = ExecutionOptions(overlap_grad_reduce=True, overlap_param_gather=True)
MEGATRON: dict[str, tuple[Layout, ExecutionOptions, list[Bad]]] = {
    "dp2": (Layout(), ExecutionOptions(), ALONE),
    "dp2, sharded, overlapped": (SHARDED, OVERLAP, [SAMPLE, Bad(LAST_RANK_ALONE + SPLIT)]),
    "tp2": (Layout(tp=2), ExecutionOptions(), [SAMPLE, *(Bad(LAST_RANK_ALONE + name) for name in (SPLIT, COPIED))]),
    "pp2": (
        Layout(pp=2),
        ExecutionOptions(),
        [SAMPLE, replace(SAMPLE, limits=NO_LIMIT), Bad(LAST_RANK_ALONE + COPIED)],
    ),
    "fsdp": (SHARDED, ExecutionOptions("fsdp"), [SAMPLE, Bad("limits", Limits(grad_norm=1e-9))]),
    "cp2": (Layout(cp=2), ExecutionOptions(), [SAMPLE, Bad(LAST_RANK_ALONE + SPLIT)]),
    "ep2": (Layout(ep=2), ExecutionOptions(), [SAMPLE, *(Bad(LAST_RANK_ALONE + name) for name in (EXPERT, COPIED))]),
    "muon": (Layout(), ExecutionOptions(), [SAMPLE, Bad(LAST_RANK_ALONE + SPLIT)]),
    "adapters": (Layout(tp=2), ExecutionOptions(), [SAMPLE, Bad(LAST_RANK_ALONE + ADAPTER)]),
}
MORE: dict[str, dict[str, Any]] = {"muon": {"optim": "muon"}, "adapters": {"with_adapters": True}}
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    where: Path = tmp_path_factory.mktemp("model")
    write_tiny_model(where, seed=1, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48)
    return str(where)


@pytest.fixture(scope="module")
def found(two_ranks: Ranks, folder: str) -> Found:
    moe = f"{folder}_moe"
    write_tiny_model(moe, seed=1, family="qwen3_moe", hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48)
    cases = {
        name: (Case(moe if name == "ep2" else folder, layout, engine, **MORE.get(name, {})), bads)
        for name, (layout, engine, bads) in MEGATRON.items()
    }
    cases |= {f"{name} without": (case, []) for name, (case, _) in cases.items()}
    ranks = two_ranks.run(run_all, cases, timeout_s=400)
    return {name: [rank[name] for rank in ranks] for name in cases}


@pytest.fixture(scope="module")
def none(folder: str) -> dict[str, dict[str, Any]]:
    case = Case(folder, Layout(), ExecutionOptions("none"))
    with Ranks(1) as ranks:
        return ranks.run(run_all, {"none": (case, ALONE), "none without": (case, [])}, timeout_s=200)[0]


@pytest.mark.parametrize("name", [*MEGATRON, "none"])
def test_nothing_changes_on_any_rank_and_the_next_step_is_as_if_it_had_not_been(
    found: Found, none: dict[str, dict[str, Any]], name: str
) -> None:
    ranks, without = (([none[n]] if name == "none" else found[n]) for n in (name, f"{name} without"))
    for rank, plain in zip(ranks, without, strict=True):
        assert [one["step"].made for one in rank["bad"]] == [False] * len(rank["bad"])
        assert all(one["same"] for one in rank["bad"]), "weights, master weights and moments"
        assert rank["steps"] == plain["steps"] == 2, "the schedule counts the steps that were made"
        assert rank["weights"].keys() == plain["weights"].keys()
        assert all(torch.equal(rank["weights"][n], plain["weights"][n]) for n in plain["weights"])


@pytest.mark.parametrize("name", MEGATRON)
def test_all_ranks_see_the_same_numbers(found: Found, name: str) -> None:
    first, second = ([(one["step"].grad_norm, one["step"].loss) for one in rank["bad"]] for rank in found[name])
    assert repr(first) == repr(second), "NaN is not equal to itself"
    _, _, bads = MEGATRON[name]
    for bad, (norm, loss) in zip(bads, first, strict=True):
        assert math.isfinite(norm) == (bad.what == "limits")
        assert math.isnan(loss) == (bad.limits is NO_LIMIT), "only a loss that is to be compared is summed"


def test_the_replica_with_the_sample_names_its_place(found: Found, none: dict[str, dict[str, Any]]) -> None:
    """On the last stage; replica 1 of dp2 has it, the last stage of pp2, both halves of tp2."""
    for name, rows in {"dp2": [1], "tp2": [0, 1], "pp2": [1], "fsdp": [1]}.items():
        for rank, one in enumerate(ranks["bad"][0] for ranks in found[name]):
            assert one["at"] == (("advantages", one["place"]) if rank in rows else None), (name, rank)
    (one, *rest) = none["none"]["bad"]
    assert one["at"] == ("advantages", one["place"])
    assert [other["at"] for other in rest] == [None] * 3


def test_the_rank_with_the_gradient_is_known(found: Found) -> None:
    """Of a parameter that both ranks hold alike Megatron counts rank 0's gradient only; rank 1 has the NaN.

    Replicas have summed their gradients, so both have it; experts are rank 1's own.
    """
    for name, at, where in (("ep2", 1, [None, EXPERT]), ("adapters", 1, [None, ADAPTER])):
        assert [ranks["bad"][at]["where"] for ranks in found[name]] == [
            parameter and parameter.removeprefix("module.") for parameter in where
        ]
    for at, name in ((1, SPLIT), (2, COPIED)):
        where = [ranks["bad"][at]["where"] for ranks in found["tp2"]]
        assert where == [None, name.removeprefix("module.")]
    assert [ranks["bad"][2]["where"] for ranks in found["pp2"]] == [None, COPIED.removeprefix("module.")]


def test_a_norm_is_rank_0s_and_each_replicas_loss_counts_once(two_ranks: Ranks, folder: str) -> None:
    """Losses of 0.25 on rank 0 and of 1.25 on rank 1."""
    for layout, loss in ((Layout(), 1.5), (Layout(tp=2), 0.25), (Layout(pp=2), 1.25)):
        assert two_ranks.run(agreements, Case(folder, layout)) == [(1.5, loss)] * 2


def test_a_weight_that_is_not_finite_is_found_on_its_rank(two_ranks: Ranks, folder: str) -> None:
    case = Case(folder, Layout(tp=2), dtype="bfloat16")
    assert two_ranks.run(bad_weights, case) == [[None, None], [None, "decoder.final_layernorm.weight"]]
