"""Times and metrics of a run: of each step, and totals over all steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megarl.arch.gpus import find
from megarl.config import Config, model_config
from megarl.metrics.computing.audit import Audit
from megarl.metrics.computing.samples import write_samples
from megarl.metrics.computing.stats import batch_stats, finalise, reward_stats
from megarl.metrics.computing.timeline import Timeline
from megarl.metrics.computing.timer import Timer
from megarl.metrics.computing.tokens import TokenLog
from megarl.metrics.reading.jsonl import SAMPLES, VISITS, append_lines
from megarl.metrics.trackers.trackers import Trackers
from megarl.rollout.prefetch import RolloutBatch
from megarl.samples.batch import Batch, Stats
from megarl.weights.count import Shape, check, forward_flops, shape_of
from megarl.weights.push.report import PushReport

GIB = 1024**3
# The metric -> role, stage, and passes over the batch; a backward pass is two.
_STAGES = {
    "perf/mfu/actor": ("actor", "update_actor", 3),
    "perf/mfu/critic": ("critic", "update_critic", 3),
    "perf/mfu/actor_infer": ("actor", "old_log_prob", 1),
}
_PER_TOKEN = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


@dataclass(frozen=True)
class Device:
    """A role's model, and what its ranks could compute together."""

    shape: Shape
    flops_per_s: float  # of all ranks of the role, by the data sheet, in bf16
    epochs: int  # passes over the batch in a step
    is_frozen: bool  # adapters are trained: frozen weights need no gradient


class StepMetrics:
    """Example: metrics |= of_step(7, batch, metrics), where metrics has the times of the stages."""

    def __init__(self, config: Config, num_prompts: int, device_names: Mapping[str, str]) -> None:
        """`num_prompts`: of an epoch.  `device_names`: of the ranks of each role; of unknown ones there is no MFU."""
        self._prompts_per_step, self._num_prompts = config.data.train_batch_size, num_prompts
        self._devices: dict[str, Device] = {}
        for role, name in device_names.items():
            with suppress(ValueError):  # a CPU, a GPU that is not known, a model whose numbers are not
                node: Any = config.role(role)
                peak = find(name).bf16_flops * node.num_ranks
                check(hf := model_config(config, role))
                frozen = role == "actor" and config.actor.lora.rank > 0
                self._devices[role] = Device(shape_of(hf, role), peak, node.ppo_epochs, frozen)

    def __call__(self, step: int, batch: Batch | None, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics of iteration `step`, counted from 1.

        training/epoch; perf/mfu/*: the share of the data sheet's bf16 FLOP/s; timing_per_token_ms/*: of prompts and
        responses, and gen of what the policy generated; perf/cpu_memory_used_gb of the driver's machine, in GiB.
        """
        out = {
            "training/global_step": float(step),
            "training/epoch": float((step - 1) * self._prompts_per_step // self._num_prompts),
            "perf/cpu_memory_used_gb": psutil.virtual_memory().used / GIB,
        }
        if batch is None or not batch.num_tokens:
            return out
        num_written = float(batch.columns["response_mask"].sum())
        for stage, num in {**dict.fromkeys(_PER_TOKEN, batch.num_tokens), "gen": num_written}.items():
            if (seconds := metrics.get(f"timing_s/{stage}")) and num:
                out[f"timing_per_token_ms/{stage}"] = 1000 * seconds / num
        for name, (role, stage, passes) in _STAGES.items():
            device, seconds = self._devices.get(role), metrics.get(f"timing_s/{stage}")
            if device is not None and seconds:
                # What rows have in common is computed once; the pass for old log-probs takes a part of the batch.
                share = metrics.get(f"{role}/computed_share", 1.0)
                share *= metrics["perf/old_log_prob_share"] if stage == "old_log_prob" else 1.0
                out[name] = share * mfu(device, batch, passes, seconds)
        return out


def mfu(device: Device, batch: Batch, passes: int, seconds: float) -> float:
    """FLOPs of the model on the batch over what its ranks could have computed in this time; recomputation is idle."""
    lengths = batch.lengths.double()
    context = float((lengths * lengths).sum() / lengths.sum())
    learns = passes > 1
    passes = (passes - device.is_frozen) * device.epochs if learns else passes
    return passes * forward_flops(device.shape, batch.num_tokens, context) / (seconds * device.flops_per_s)


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


@dataclass(frozen=True)
class RunLog:
    """Example: with log.timer("gen"): ...; log.record(step, rollout, batch, stats, push_report, {})."""

    timer: Timer
    trackers: Trackers
    totals: Totals
    folder: Path  # of the run: samples.jsonl, some completions of every step; visits.jsonl, what became of each visit
    num_devices: int  # for throughput per device
    timeline: Timeline  # timeline.jsonl: stages and calls to ranks
    tokens: TokenLog | None  # tokens.jsonl: some of these completions token by token; None: trainer.token_samples=0
    audit: Audit  # of reward.audit, over all evaluations
    step_metrics: StepMetrics  # further numbers of a step, under verl's names

    def record(
        self,
        step: int,
        rollout: RolloutBatch,
        batch: Batch | None,
        stats: Stats,
        push_report: PushReport,
        more: dict[str, float],
    ) -> None:
        """Write down step `step`, counted from 1, whose weights are pushed, and begin the times of the next one.

        `rollout`: its `reward_s` are the seconds in which the trainer waited for rewards alone.  `batch`: None if
        nothing was trained.  `more`: metrics of other parts of the run.
        """
        timer, phases = self.timer, push_report.timings
        with timer("log"):
            write_samples(self.folder / SAMPLES, step, rollout.groups)
            if self.tokens:
                self.tokens.write(step, rollout.groups, batch)
            of_ranks = self.timeline.write(step, timer)
            append_lines(self.folder / VISITS, [{"step": step, **rollout.visits}])
            metrics = finalise(stats) | (batch_stats(batch, version=step - 1) if batch is not None else {})
            metrics |= rollout.metrics | reward_stats(rollout.groups) | of_ranks | more
        num_tokens = 0 if batch is None else batch.num_tokens
        metrics |= timer.finish(num_tokens=num_tokens, num_devices=self.num_devices)
        metrics |= {f"timing_s/push/{phase}": seconds for phase, seconds in phases.items()}
        metrics["timing_s/push/other"] = max(0.0, metrics["timing_s/update_weights"] - sum(phases.values()))
        metrics |= self.step_metrics(step, batch, metrics)
        waited = metrics["timing_s/gen"] + rollout.reward_s + metrics.get("timing_s/drain", 0.0)
        metrics["rollout/idle_share"] = waited / metrics["timing_s/step"]
        with timer("log"):
            self.totals.add(metrics)
            self.trackers.log(step, metrics)
