"""Evaluations of real runs: each of one version of the weights, beside the training as in its way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ring_cases import lines, make_parts, settings, steps

from megarl.cli import main

pytestmark = [pytest.mark.dist, pytest.mark.slow]
GRPO = ["algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=1", "trainer.test_freq=1", "reward.audit=exact"]
SAMPLED = ["rollout.val_kwargs.n=2", "rollout.val_kwargs.temperature=1.0", "actor.optim.lr=3e-2"]


def test_evaluations_beside_the_training_are_those_in_its_way(tmp_path: Path) -> None:
    parts = make_parts(tmp_path / "parts")
    found = {}
    for name, more in (("in_its_way", []), ("beside", ["trainer.eval_beside=true"])):
        words = settings(parts, tmp_path, name, *GRPO, *more, *SAMPLED, "trainer.total_training_steps=2")
        assert main(["train", *words]) == 0
        found[name] = lines(tmp_path / name / "evaluations.jsonl")
        assert [(line["step"], line["version"]) for line in found[name]] == [(0, 0), (1, 1), (2, 2)]
        logged = steps(tmp_path / name, "val-core/arithmetic/reward/mean@2")
        assert sorted(logged) == [0, 1, 2] and "val-aux/arithmetic/reward/mean@2/stderr" in found[name][0]
        assert all(len(prompt["audit"]) == len(prompt["reward"]) == 2 for prompt in found[name][0]["prompts"])
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["evaluated_version"] == 2 and summary["score_before"] == logged[0]
        assert "reward/audit" in lines(tmp_path / name / "metrics.jsonl")[-2], "the training's answers are audited, too"
    assert found["beside"] == found["in_its_way"]
    assert found["beside"][0]["prompts"] != found["beside"][2]["prompts"], "the answers of two policies"
    of_steps = [line for line in lines(tmp_path / "beside/metrics.jsonl") if "timing_s/step" in line]
    assert all("timing_s/testing" in line for line in of_steps), "the first two evaluations were beside a step"
    assert sorted(steps(tmp_path / "in_its_way", "timing_s/testing")) == [0, 1, 2]
