"""Two runs' adapters on one base, trained in turns, against two runs that have a base each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapter_turns_cases import RUNS, all_turns
from spawn import Ranks
from tiny_models import write_model

pytestmark = [pytest.mark.slow, pytest.mark.dist]

OFFLOAD = {"param_offload": True, "optimizer_offload": True}
SP = {"tp": 2, "sequence_parallel": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ep2": ("qwen3_moe", {"ep": 2}, {}),
    "tp2+sp offloaded": ("qwen3_moe", SP, OFFLOAD),
    "dp2 sharded overlapped": ("qwen3_moe", {"use_distributed_optimizer": True}, {"overlap_grad_reduce": True}),
    "pp2 recomputed": (
        "qwen3_moe",
        {"pp": 2},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "latent tp2+sp ep2": ("deepseek_v3_plain", {**SP, "ep": 2, "etp": 1}, {}),
}


@pytest.fixture(scope="module")
def found(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    where = tmp_path_factory.mktemp("turns")
    for family in {family for family, *_ in CASES.values()}:
        write_model(where / family, family, tied=False)
    return two_ranks.run(all_turns, str(where), str(where / "out"), CASES, timeout_s=500)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("case", CASES)
def test_runs_in_turns_equal_separate_runs(found: list[dict[str, Any]], case: str, run: str) -> None:
    """The same operations in the same order: not one bit differs."""
    for rank in found:
        stats, adapters, columns = rank[case]["together"][run]
        own_stats, own, own_columns = rank[case]["alone"][run]
        assert stats == own_stats and len({step["grad_norm"] for step in stats}) == len(stats)
        assert sorted(adapters) == sorted(own)
        assert all(torch.equal(adapters[name], tensor) for name, tensor in own.items())
        assert columns.keys() == own_columns.keys()
        assert all(torch.equal(columns[name], column) for name, column in own_columns.items())


@pytest.mark.parametrize("case", CASES)
def test_the_base_stays_what_it_was_and_is_held_once(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        before, after = rank[case]["base before"], rank[case]["base after"]
        assert all(torch.equal(after[name], column) for name, column in before.items())
        assert rank[case]["held once"]
    reporter = next(rank[case] for rank in found if rank[case]["base before"])
    base = reporter["base before"]["log_probs"]
    for run in RUNS:
        assert (reporter["together"][run][2]["log_probs"] - base).abs().max() > 0.01


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_saved_and_restored_beside_others(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        saved = rank[case]["together"]["second"][1]
        assert all(torch.equal(rank[case]["restored"][name], tensor) for name, tensor in saved.items())
        (stats, own), (other_stats, other) = rank[case]["again"]
        assert stats == other_stats, "the gradient, and of the optimizer the learning rate"
        assert all(torch.equal(other[name], tensor) for name, tensor in own.items()), "and its moments"
        assert any(not torch.equal(saved[name], tensor) for name, tensor in own.items())


def test_every_role_goes_where_its_options_say(found: list[dict[str, Any]]) -> None:
    """Of each run: the shared base, its adapters, their gradients, the moments."""
    for rank in found:
        assert rank["tp2+sp offloaded"]["offloaded"] == [True] * 8
        assert rank["ep2"]["offloaded"] == [False] * 8


def test_bases_that_cannot_be_shared_are_refused(found: list[dict[str, Any]]) -> None:
    """The runs went on from there, so the adapters that had no optimizer have left the base."""
    said = found[0]["ep2"]["refused"]
    assert said["folder"].startswith("base=first: that role has the folder ")
    assert said["kind"] == "base=first: that role has a model of kind actor, not critic; expected the same"
    assert said["no adapters"] == (
        "base=first: without adapters the shared weights would be trained; expected lora, or no optim"
    )
    assert said["optimizer"] == "optim.name=muon: expected use_distributed_optimizer=false and no lora"
    assert said["both"].startswith("role second has the same base as first, which is in use by one of them at a time")
