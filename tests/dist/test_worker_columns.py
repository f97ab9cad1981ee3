"""A worker's calls `columns` and `update` with the names of columns and with a reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from spawn import Ranks
from worker_cases import follow_the_kl

from megarl.data.examples.tiny import write_tiny_model
from megarl.mcore.logprobs.logprobs import NAMES
from megarl.mcore.training.execution import ExecutionOptions

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where: Path = tmp_path_factory.mktemp("model")
    write_tiny_model(where, seed=1, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48)
    return where


@pytest.fixture(scope="module")
def found(two_ranks: Ranks, folder: Path) -> list[dict[str, Any]]:
    return two_ranks.run(follow_the_kl, str(folder), ExecutionOptions())


@pytest.fixture(scope="module")
def offloaded(two_ranks: Ranks, folder: Path) -> list[dict[str, Any]]:
    return two_ranks.run(follow_the_kl, str(folder), ExecutionOptions(param_offload=True, optimizer_offload=True))


def test_the_last_stage_answers_with_the_columns_asked_for(found: list[dict[str, Any]]) -> None:
    silent, reporter = found
    assert (silent["is_reporter"], silent["first"], silent["only"]) == (False, {}, [])
    assert sorted(reporter["first"]) == sorted(NAMES)
    assert reporter["only"] == ["entropy"]
    assert {column.shape for column in reporter["first"].values()} == {(18,)}
    assert reporter["first"]["full_kl"].abs().max() < 1e-6, "the reference is the same model"


def test_the_full_kl_as_a_loss_brings_the_policy_back(found: list[dict[str, Any]]) -> None:
    kls = found[1]["kls"]
    assert kls[0] > 1e-3
    assert kls == sorted(kls, reverse=True)
    assert kls[-1] < 0.8 * kls[0]


def test_a_loss_is_made_once_for_all_updates_with_its_settings(found: list[dict[str, Any]]) -> None:
    """Making one tries it out; the first step has other settings than the three after it."""
    assert [rank["same"] for rank in found] == [[False, True, True]] * 2


def test_a_call_wakes_what_it_needs_and_leaves_it_as_it_was(
    found: list[dict[str, Any]], offloaded: list[dict[str, Any]]
) -> None:
    """In the end both are put to offload, called, woken and called."""
    for plain, resting in zip(found, offloaded, strict=True):
        assert resting["kls"] == plain["kls"], "not a bit changes"
        assert all(torch.equal(column, plain["first"][name]) for name, column in resting["first"].items())
        assert plain["offloaded"] == [[False, False, False], [True, False, True], [False, False, False]]
        assert resting["offloaded"] == [[True, True, True], [True, True, True], [False, True, False]]
        assert plain["offload"]["num_bytes"] > 0 == resting["offload"]["num_bytes"]
