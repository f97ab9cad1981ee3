"""Whole small runs that train layers which predict further tokens."""

import json
from pathlib import Path

import pytest
import torch
from parity_compare import assert_same_bits
from ring_cases import make_parts, settings, steps
from safetensors.torch import load_file
from tiny_models import add_mtp

from megarl.cli import main

pytestmark = [pytest.mark.full, pytest.mark.dist, pytest.mark.megatron_0_19]
LAYOUTS = {"detached": "pipeline_model_parallel_size=2", "joint": "context_parallel_size=2"}


@pytest.mark.parametrize(("family", "how"), [("qwen3_5_text", "detached"), ("deepseek_v3", "joint")])
def test_mtp_layers_learn_what_the_policy_writes(tmp_path: Path, family: str, how: str) -> None:
    """Pushes go on without them, a save has them, and the model that is written has them as they have become."""
    parts = make_parts(tmp_path / "parts", family=family, tied=False)
    add_mtp(parts / "model")
    # A policy of random weights is nearly uniform: at this temperature there is something to learn.
    more = [f"actor.mtp={how}", "rollout.temperature=0.1", "actor.optim.lr=1e-2", "algorithm.adv_estimator=grpo"]
    more += [f"actor.megatron.{LAYOUTS[how]}", "trainer.save_freq=4"]
    for last in (4, 8) if how == "detached" else (8,):  # the second goes on where the first ended
        words = settings(parts, tmp_path, "run", *more, f"trainer.total_training_steps={last}")
        assert main(["train", *words]) == 0
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["pushes"] == summary["pushes_verified"] >= 9
    assert 0 < max(steps(run, "rollout_corr/log_prob_gap_max").values()) < 1e-4
    loss, accepted, entropy = (steps(run, f"actor/{name}") for name in ("mtp_loss", "mtp_acceptance", "entropy"))
    assert loss[8] < loss[1] / 4 and loss[8] - entropy[8] < (loss[1] - entropy[1]) / 2, "not only as the policy's falls"
    assert 0 < accepted[1] < 0.6 < accepted[8] <= 1
    before, after = (load_file(folder / "model.safetensors") for folder in (parts / "model", run / "hf"))
    assert sorted(before) == sorted(after)
    assert not any(torch.equal(before[name], after[name]) for name in before if "eh_proj" in name or "mtp.fc" in name)
    if how == "joint":  # DeepSeek's folder has embedding and output rows twice
        assert torch.equal(after["model.layers.2.embed_tokens.weight"], after["model.embed_tokens.weight"])
    else:
        saved = run / "checkpoints" / "step_00000008" / "actor"
        assert main(["convert", f"from={saved}", f"to={tmp_path}/converted"]) == 0
        converted = load_file(tmp_path / "converted" / "model.safetensors")
        assert_same_bits(converted, after)
