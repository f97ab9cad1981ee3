"""Whole small runs of every family that the installed Megatron-Core has: PPO with a critic, on two ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from ring_cases import lines, make_parts, settings, steps
from strikes import weights
from tiny_models import LACKING

from megarl.arch.model_types import SPARSE_LATENT
from megarl.cli import main
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import FAMILIES

pytestmark = [pytest.mark.full, pytest.mark.dist]
FOUR_LAYERS = TinySizes(hidden=32, layers=4, heads=4, kv_heads=2, head_dim=8, ffn=64)
RESUMED = ("qwen3_moe", "qwen3_next", "nemotron_h", "deepseek_v32")
LAYOUT = [
    f"{role}.megatron.{key}"
    for role in ("actor", "critic")
    for key in (
        "tensor_model_parallel_size=2",
        "sequence_parallel=true",
        "expert_model_parallel_size=2",
        "expert_tensor_parallel_size=1",
    )
]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in LACKING])
def test_a_run_of_each_family_trains_the_weights_that_its_server_has(tmp_path: Path, family: str) -> None:
    parts = make_parts(tmp_path, family=family)
    words = settings(parts, tmp_path, "whole", "actor.use_kl_loss=true", "trainer.total_training_steps=2")
    assert main(["train", *words]) == 0
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["pushes"] == summary["pushes_verified"] == 3
    gaps = steps(tmp_path / "whole", "rollout_corr/log_prob_gap_max")
    if family in SPARSE_LATENT:  # at first <pad>, which is sampled too, is all zeros: indexers choose among equal keys
        del gaps[1]
    assert 0 < max(gaps.values()) < 1e-4
    for role in ("actor", "critic"):
        assert all(norm > 0 for norm in steps(tmp_path / "whole", f"{role}/grad_norm").values())


def numbers(run: Path) -> list[dict[str, Any]]:
    """Those of training, which depend on nothing but the run's configuration."""
    rows = lines(run / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key.startswith(("actor/", "critic/"))} for row in rows]


@pytest.mark.parametrize("family", [family for family in RESUMED if family not in LACKING])
def test_a_run_over_all_ranks_goes_on_to_the_last_bit(tmp_path: Path, family: str) -> None:
    parts = make_parts(tmp_path, FOUR_LAYERS, family=family, tied=False)
    for name, ends in (("whole", (3,)), ("cut", (2, 3))):
        for end in ends:
            more = [*LAYOUT, f"trainer.total_training_steps={end}", "trainer.save_freq=1"]
            assert main(["train", *settings(parts, tmp_path, name, *more)]) == 0
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
