"""Whole small runs of a model with experts: those of each token travel from the server into every pass."""

import json
from collections.abc import Callable
from pathlib import Path

import other_experts_server
import pytest
from ring_cases import lines, make_parts, settings, steps, train_kill_resume

from megarl.servers.server_process import ENGINES

pytestmark = [pytest.mark.full, pytest.mark.dist]
Trained = Callable[..., Path]
GRPO = ["algorithm.adv_estimator=grpo", "actor.ppo_mini_batch_size=2"]
TWO_STEPS = ["trainer.total_training_steps=2"]
EP2, PP2 = "actor.megatron.expert_model_parallel_size=2", "actor.megatron.pipeline_model_parallel_size=2"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("parts"), family="qwen3_moe", moe_intermediate_size=24)


@pytest.mark.parametrize(("chosen", "layout"), [("rollout", EP2), ("old", PP2)])
def test_a_run_replays_the_experts_of_its_tokens(trained: Trained, chosen: str, layout: str) -> None:
    """In pieces, and in two optimizer steps of an iteration, of which only the first has the old weights."""
    found = trained(chosen, *GRPO, f"actor.router_replay={chosen}", "rollout.piece_tokens=3", layout, *TWO_STEPS)
    summary = json.loads((found / "summary.json").read_text())
    assert summary["pushes"] == summary["pushes_verified"] == 3
    assert 0 < max(steps(found, "rollout_corr/log_prob_gap_max").values()) < 1e-4
    assert max(abs(kl) for kl in steps(found, "actor/first_ppo_kl").values()) < 1e-8
    assert all(norm > 0 for norm in steps(found, "actor/grad_norm").values())


def test_every_pass_takes_the_experts_that_the_servers_report(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not those that wrote the tokens, so that log-probs differ; the two passes of the trainer agree."""
    monkeypatch.setitem(ENGINES, "hf", other_experts_server.command)
    found = trained("others", *GRPO, "actor.router_replay=rollout", EP2, "trainer.total_training_steps=1")
    assert min(steps(found, "rollout_corr/log_prob_gap_max").values()) > 1e-3
    assert max(abs(kl) for kl in steps(found, "actor/first_ppo_kl").values()) < 1e-8


def test_a_run_ahead_keeps_the_experts_of_what_older_weights_wrote(parts: Path, tmp_path: Path) -> None:
    """Pushes end running requests, and others go on; a killed run takes the groups that wait, with their experts."""
    ahead = ["rollout.ahead=2", "rollout.update=retract", "trainer.save_freq=2", "trainer.total_training_steps=4"]
    words = settings(parts, tmp_path, "ahead", *GRPO, "actor.router_replay=rollout", EP2, *ahead)
    found = tmp_path / "ahead"
    train_kill_resume(words, found, 3)
    assert max(steps(found, "actor/grad_norm")) == 4
    assert len(lines(found / "samples.jsonl")) == 4 * 16
