"""On a real GPU: a run with the hf engine on the trainer's GPU is killed, and goes on from its checkpoint."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from ring_cases import PPO, SHAPE, lines, make_parts, settings, train_kill_resume

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
ONE_GPU = [
    "trainer.device=cuda",
    "trainer.n_gpus_per_node=1",
    "actor.megatron.tensor_model_parallel_size=1",
    "model.dtype=bfloat16",
    "rollout.engine=hf",
    "rollout.placement=shared",
    "rollout.first_gpu=0",
]
MORE = ["trainer.total_training_steps=5", "trainer.save_freq=2", "trainer.test_freq=-1"]


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Killed after step 3, saved after step 2.  A GPU repeats no sum to the bit, so that no number is compared."""
    parts = make_parts(tmp_path / "parts", replace(SHAPE, hidden=256, head_dim=64, ffn=512))
    assert train_kill_resume(settings(parts, tmp_path, "killed", *PPO, *ONE_GPU, *MORE), tmp_path / "killed", 3) >= 3
    rows = lines(tmp_path / "killed" / "metrics.jsonl")
    assert [row["step"] for row in rows if "actor/grad_norm" in row] == [1, 2, 3, 4, 5]
    summary = json.loads((tmp_path / "killed" / "summary.json").read_text())
    assert summary["pushes"] == summary["pushes_verified"] > 0
