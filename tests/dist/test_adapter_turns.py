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
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ep2": ({"ep": 2}, {}),
    "tp2+sp offloaded": ({"tp": 2, "sequence_parallel": True}, OFFLOAD),
    "dp2 sharded overlapped": ({"use_distributed_optimizer": True}, {"overlap_grad_reduce": True}),
    "pp2 recomputed": (
        {"pp": 2},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
}


@pytest.fixture(scope="module")
def found(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    where = tmp_path_factory.mktemp("turns")
    folder = write_model(where / "model", "qwen3_moe", tied=False)
    return two_ranks.run(all_turns, str(folder), str(where), CASES, timeout_s=400)


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
        first, second = rank[case]["parameters"]
        assert first > second, "with the base and adapters of rank 4, and of rank 2 on fewer projections"
    reporter = next(rank[case] for rank in found if rank[case]["base before"])
    base = reporter["base before"]["log_probs"]
    for run in RUNS:
        assert (reporter["together"][run][2]["log_probs"] - base).abs().max() > 0.01


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_saved_and_restored_beside_others(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        saved = rank[case]["together"]["second"][1]
        assert all(torch.equal(rank[case]["restored"][name], tensor) for name, tensor in saved.items())


def test_every_role_goes_where_its_options_say(found: list[dict[str, Any]]) -> None:
    """Of each run: the shared base, its adapters, their gradients, the moments."""
    for rank in found:
        assert rank["tp2+sp offloaded"]["offloaded"] == [True] * 8
        assert rank["ep2"]["offloaded"] == [False] * 8


def test_bases_that_cannot_be_shared_are_refused(found: list[dict[str, Any]]) -> None:
    said = found[0]["ep2"]["refused"]
    assert said["folder"].startswith("base=first: that role has the folder ")
    assert said["kind"] == "base=first: that role has a model of kind actor, not critic; expected the same"
    assert said["no adapters"] == (
        "base=first: without adapters the shared weights would be trained; expected lora, or no optim"
    )
    assert said["both"].startswith("role second has the same base as first, which is in use by one of them at a time")
