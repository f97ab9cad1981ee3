"""Whole small runs of models whose layers have states: pushes are verified, and a run goes on to the bit."""

import json
from pathlib import Path
from typing import Any

import pytest
from ring_cases import lines, make_parts, settings, steps
from strikes import weights
from tiny_models import LACKING

from megarl.cli import main
from megarl.data.examples.sizes import TinySizes

pytestmark = [pytest.mark.full, pytest.mark.dist]
SHAPE = TinySizes(hidden=32, layers=4, heads=4, kv_heads=2, head_dim=8, ffn=64)
LAYOUT = [
    f"{role}.megatron.{key}"
    for role in ("actor", "critic")
    for key in ("tensor_model_parallel_size=2", "sequence_parallel=true", "expert_model_parallel_size=2")
]


def numbers(run: Path) -> list[dict[str, Any]]:
    """Those of training, which depend on nothing but the run's configuration."""
    return [{key: value for key, value in row.items() if key.startswith(("actor/", "critic/"))} for row in lines(run)]


@pytest.mark.parametrize("family", [family for family in ("qwen3_next", "nemotron_h") if family not in LACKING])
def test_a_run_of_three_steps_is_verified_and_goes_on_to_the_bit(tmp_path: Path, family: str) -> None:
    parts = make_parts(tmp_path / "parts", SHAPE, family=family, tied=False)
    more = [*LAYOUT, *(f"{role}.megatron.expert_tensor_parallel_size=1" for role in ("actor", "critic"))]
    words = {name: settings(parts, tmp_path, name, *more, "trainer.save_freq=1") for name in ("whole", "cut")}
    assert main(["train", *words["whole"]]) == 0
    assert main(["train", *words["cut"], "trainer.total_training_steps=2"]) == 0
    assert main(["train", *words["cut"]]) == 0
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert 0 < max(steps(whole, "rollout_corr/log_prob_gap_max").values()) < 1e-4
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["pushes"] == summary["pushes_verified"] == 4
    assert numbers(cut / "metrics.jsonl") == numbers(whole / "metrics.jsonl")
    assert weights(cut) == weights(whole)
