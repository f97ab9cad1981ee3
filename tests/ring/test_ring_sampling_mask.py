"""A run that samples with top_p and top_k: server and trainer agree, because both know what could be drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from ring_cases import PPO, lines, make_parts, settings, steps

from megarl.cli import main
from megarl.trainer import roles

pytestmark = [pytest.mark.dist, pytest.mark.slow]
NARROW = ["rollout.engine=hf", "rollout.top_p=0.6", "rollout.top_k=20"]
GAP = "rollout_corr/log_prob_gap_max"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def run(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On two tensor-parallel ranks, with a reference and a critic; pieces of two tokens."""
    runs = tmp_path_factory.mktemp("runs")
    more = ["rollout.piece_tokens=2", "algorithm.use_kl_in_reward=true"]
    assert main(["train", *settings(parts, runs, "narrow", *PPO, *NARROW, *more)]) == 0
    return runs / "narrow"


def test_the_gap_is_that_of_a_run_that_samples_from_everything(run: Path) -> None:
    gaps = steps(run, GAP)
    assert len(gaps) == 3
    assert 0 < max(gaps.values()) < 1e-4


def test_nothing_has_moved_at_the_first_step_neither_policy_nor_reference(run: Path) -> None:
    assert max(abs(kl) for kl in steps(run, "actor/first_ppo_kl").values()) < 1e-8
    assert abs(steps(run, "actor/reward_kl_penalty")[1]) < 1e-8


def test_without_the_replay_the_gap_is_large(
    run: Path, parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run, whose ranks are not told what could be drawn: they take the softmax of all."""
    monkeypatch.setattr(roles, "names_in_batch", lambda name: ())  # noqa: ARG005
    words = settings(parts, tmp_path, "blind", *PPO, *NARROW, "trainer.total_training_steps=1")
    assert main(["train", *words]) == 0
    assert steps(tmp_path / "blind", GAP)[1] > 0.3, "the logarithm of the mass that the server kept"
    first = [[s["completion"] for s in lines(r / "samples.jsonl") if s["step"] == 1] for r in (run, tmp_path / "blind")]
    assert first[0] == first[1]
