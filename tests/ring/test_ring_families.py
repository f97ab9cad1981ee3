"""Whole small runs of every family that the installed Megatron-Core has: PPO with a critic, on two ranks."""

import json
from pathlib import Path

import pytest
from ring_cases import lines, make_parts, settings, steps
from tiny_models import LACKING

from megarl.arch.model_types import OF_0_19
from megarl.cli import main
from megarl.data.examples.tiny import FAMILIES

pytestmark = [pytest.mark.full, pytest.mark.dist]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in LACKING])
def test_a_run_of_each_family_trains_the_weights_that_its_server_has(tmp_path: Path, family: str) -> None:
    parts = make_parts(tmp_path, family=family)
    words = settings(parts, tmp_path, "whole", "actor.use_kl_loss=true", "trainer.total_training_steps=2")
    assert main(["train", *words]) == 0
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["pushes"] == summary["pushes_verified"] == 3
    assert 0 < max(steps(tmp_path / "whole", "rollout_corr/log_prob_gap_max").values()) < 1e-4
    for role in ("actor", "critic"):
        assert all(norm > 0 for norm in steps(tmp_path / "whole", f"{role}/grad_norm").values())


@pytest.mark.parametrize("family", ["qwen3", *(family for family in OF_0_19 if family not in LACKING)])
def test_a_resumed_run_of_a_new_family_goes_on_to_the_last_bit(tmp_path: Path, family: str) -> None:
    parts, found = make_parts(tmp_path, family=family), {}
    for name, ends in (("whole", (2,)), ("resumed", (1, 2))):
        for end in ends:
            more = [f"trainer.total_training_steps={end}", "trainer.save_freq=1"]
            assert main(["train", *settings(parts, tmp_path, name, *more)]) == 0
        found[name] = [
            {key: value for key, value in row.items() if key.startswith(("actor/", "critic/", "reward/"))}
            for row in lines(tmp_path / name / "metrics.jsonl")
        ]
    assert found["whole"] == found["resumed"]
