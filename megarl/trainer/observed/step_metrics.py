"""Numbers of a step that need the run's model, data and devices, under the names that verl gives them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from megarl.batch import Batch
from megarl.config import Config
from megarl.plan.from_config import numbers_of_model
from megarl.plan.gpus import find
from megarl.plan.time.flops import Shape, forward_flops, shape_of

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
                shape = shape_of(numbers_of_model(config, role), role)
                frozen = role == "actor" and config.actor.lora.rank > 0
                self._devices[role] = Device(shape, peak, node.ppo_epochs, frozen)

    def __call__(self, step: int, batch: Batch | None, metrics: Mapping[str, float]) -> dict[str, float]:
        """Of iteration `step`, counted from 1.

        training/epoch; perf/mfu/*: the share of the data sheet's bf16 FLOP/s; timing_per_token_ms/*: of prompts and
        responses, and gen of what the policy wrote; perf/cpu_memory_used_gb of the driver's machine, in GiB.
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
