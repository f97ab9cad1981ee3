"""The benchmark of replay counts gaps and experts as it says."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.logprobs import bench_replay
from megarl.samples.batch import Batch


def test_gaps_are_those_of_tokens_that_the_server_wrote() -> None:
    columns = {"response_mask": torch.tensor([0.0, 1.0, 1.0]), "rollout_log_probs": torch.tensor([0.0, -1.0, -2.0])}
    batch = Batch(torch.tensor([5, 6, 7]), torch.tensor([3]), columns)
    assert bench_replay.gaps(torch.tensor([-9.0, -1.5, -1.75]), batch) == {"mean": 0.375, "max": 0.5}


def test_experts_in_another_order_are_the_same_set() -> None:
    ours = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[7, 7], [7, 7]]])
    theirs = torch.tensor([[[1, 0], [2, 3]], [[0, 1], [2, 1]], [[0, 0], [0, 0]]])
    written = torch.tensor([True, True, False])
    assert bench_replay.share_of_other_experts(ours, theirs, written) == 0.25


def test_ratios_are_medians_over_the_families() -> None:
    gaps = [(1.0, 0.5), (4.0, 0.5), (9.0, 0.5)]
    rows = [{"case": "top_p, top_k", "mean gap without": a, "mean gap with replay": b} for a, b in gaps]
    assert bench_replay.ratios(rows) == {"top_p_top_k_without_over_with": 8.0}


@pytest.mark.parametrize("family", bench_replay.FAMILIES)
def test_models_of_a_kind_differ_in_their_routers_only(family: str, tmp_path: Path) -> None:
    one, other = (
        load_file(bench_replay.write_model(tmp_path / str(seed), family, "nearly tied", seed) / "model.safetensors")
        for seed in (0, 1)
    )
    differ = {name for name in one if not torch.equal(one[name], other[name])}
    assert differ == {name for name in one if name.endswith(".gate.weight")}
    assert differ
