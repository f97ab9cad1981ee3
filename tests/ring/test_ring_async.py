"""Whole small runs that prefetch: every visit is trained once over a kill, and what drains is the same to the bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from ring_cases import PPO, lines, make_parts, settings, steps, train_kill_resume

from megarl.cli import main
from megarl.trainer.checkpoint.checkpoint import ROLLOUTS, all_checkpoints

pytestmark = pytest.mark.dist

SMALL = [*PPO, "trainer.test_freq=-1"]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("parts"))


def visits_of(run: Path, outcome: str) -> list[int]:
    return [visit for row in lines(run / "visits.jsonl") for visit in row[outcome]]


def model_digest(run: Path) -> str:
    (file,) = (run / "hf").glob("*.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.slow
def test_two_lives_of_a_run_that_runs_ahead_train_every_visit_once(parts: Path, tmp_path: Path) -> None:
    run = tmp_path / "killed"
    more = ["rollout.ahead=3", "trainer.total_training_steps=8", "trainer.save_freq=1"]
    train_kill_resume(settings(parts, tmp_path, "killed", *SMALL, *more), run, 4)
    assert sorted(steps(run, "actor/pg_loss")) == list(range(1, 9))
    assert sorted(visits_of(run, "trained")) == list(range(32))
    assert visits_of(run, "filtered") == visits_of(run, "lost") == []
    last = all_checkpoints(run / "checkpoints")[-1]
    ledger = json.loads((last.folder / "manifest.json").read_text())["state"]["ledger"]
    assert (ledger["trained"], ledger["open"]) == (32, [])
    assert (last.folder / ROLLOUTS).is_dir()


@pytest.mark.long
def test_dynamic_sampling_that_runs_ahead_settles_every_visit_once(parts: Path, tmp_path: Path) -> None:
    run = tmp_path / "killed"
    more = ["rollout.ahead=2", "trainer.total_training_steps=6", "trainer.save_freq=2", "rollout.n=2"]
    more += ["algorithm.filter_groups.enable=true"]
    train_kill_resume(settings(parts, tmp_path, "killed", *SMALL, *more), run, 3)
    trained, filtered = visits_of(run, "trained"), visits_of(run, "filtered")
    assert len(trained) == 24 and filtered
    assert len(set(trained) | set(filtered)) == len(trained) + len(filtered), "none is settled twice"


@pytest.mark.slow
def test_what_runs_ahead_in_order_and_drains_is_the_same_to_the_bit(parts: Path, tmp_path: Path) -> None:
    more = ["rollout.ahead=2", "rollout.order=prompts", "rollout.update=drain", "trainer.total_training_steps=6"]
    more += ["rollout.num_servers=2", "rollout.piece_tokens=2"]
    for name in ("first", "second"):
        assert main(["train", *settings(parts, tmp_path, name, *SMALL, *more)]) == 0
    first, second = tmp_path / "first", tmp_path / "second"
    assert visits_of(first, "trained") == visits_of(second, "trained") == list(range(24))
    for metric in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "off_policy/version_lag/max"):
        assert steps(first, metric) == steps(second, metric), metric
    assert max(steps(first, "off_policy/version_lag/max").values()) == 2
    assert model_digest(first) == model_digest(second)
    for sample in lines(first / "samples.jsonl"):
        assert len({version for version, _, _ in sample["versions"]}) == 1, "no completion sees two versions"


@pytest.mark.long
def test_on_shared_gpus_a_completion_may_last_several_turns(parts: Path, tmp_path: Path) -> None:
    """A turn ends when an iteration is finished; what other completions have by then is kept, with its version."""
    more = ["rollout.placement=shared", "rollout.turn_s=0.01", "rollout.max_running_requests=8"]
    more += ["data.max_response_length=48", "trainer.total_training_steps=5"]
    run = tmp_path / "turns"
    assert main(["train", *settings(parts, tmp_path, "turns", *SMALL, *more)]) == 0
    assert sorted(visits_of(run, "trained")) == list(range(20))
    spans = [sample["versions"] for sample in lines(run / "samples.jsonl")]
    assert all(each[0][1] == 0 and each[-1][2] > 0 for each in spans)
    assert max(len(each) for each in spans) > 1, "no completion lasted two turns"
    wasted = steps(run, "rollout/tokens_wasted_share")
    assert max(wasted.values()) == 0
