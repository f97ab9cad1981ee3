"""Times and metrics of a run: of each step, and totals over all steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.metrics.evaluation.audit import Audit
from megarl.metrics.timeline import Timeline
from megarl.metrics.timer import Timer
from megarl.metrics.tokens import TokenLog
from megarl.metrics.trackers.trackers import Trackers
from megarl.trainer.observed.step_metrics import StepMetrics


@dataclass(frozen=True)
class RunLog:
    """Example: with log.timer("gen"): ...; log.trackers.log(step, metrics); log.totals.add(metrics)."""

    timer: Timer
    trackers: Trackers
    totals: Totals
    folder: Path  # of the run: samples.jsonl, some completions of every step; visits.jsonl, what became of each visit
    num_devices: int  # for throughput per device
    timeline: Timeline | None = None  # timeline.jsonl: stages and calls to ranks
    tokens: TokenLog | None = None  # tokens.jsonl: some of these completions token by token
    audit: Audit = field(default_factory=Audit)  # of reward.audit, over all evaluations
    of_step: StepMetrics | None = None  # further numbers of a step, under verl's names


class Totals:
    """Totals over the whole run, saved in its checkpoints."""

    def __init__(self, began: float, saved: dict[str, Any]) -> None:
        self.began = began  # of the run, less the time of the runs that it continues
        self.pushes = saved.get("pushes", 0)
        self.pushes_verified = saved.get("pushes_verified", 0)
        self.log_prob_gap_max = saved.get("log_prob_gap_max", 0.0)
        self.first_ppo_kl_max = saved.get("first_ppo_kl_max", 0.0)
        self.lost_rollouts = saved.get("lost_rollouts", 0)
        self.unscored_answers = saved.get("unscored_answers", 0)  # of training, on which a reward failed
        self.last_score: float | None = saved.get("last_score")

    def add(self, metrics: dict[str, float]) -> None:
        self.log_prob_gap_max = max(self.log_prob_gap_max, metrics.get("rollout_corr/log_prob_gap_max", 0.0))
        self.first_ppo_kl_max = max(self.first_ppo_kl_max, abs(metrics.get("actor/first_ppo_kl", 0.0)))
        self.lost_rollouts += int(metrics["rollout/lost"])
        self.unscored_answers += int(metrics.get("reward/unscored", 0.0))
        self.last_score = metrics.get("critic/score/mean", self.last_score)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "began"} | {
            "wall_s": round(self.wall_s, 1)
        }

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.began
