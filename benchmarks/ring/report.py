"""What a run's own numbers say of it: stages, tokens, and how much of the hardware's arithmetic they come to."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config import Config
from megarl.weights.count import forward_flops, shape_of

STAGES = ("gen", "batch", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights",
          "turn", "log", "save_checkpoint")  # fmt: skip
UNACCOUNTED = "unaccounted"


class Peak(NamedTuple):
    """What all devices of the run together could multiply, FLOP/s, and where that number is from."""

    flops: float
    num_devices: int
    source: str


def read_steps(file: Path, skip: int) -> list[dict[str, float]]:
    """The numbers of each step after the first `skip`."""
    lines = file.read_text().splitlines() if file.exists() else []
    steps = [json.loads(line) for line in lines]
    return [step for step in steps if "timing_s/step" in step and step["step"] > skip]


def stage_rows(steps: list[dict[str, float]]) -> list[dict[str, Any]]:
    """A row for each stage, medians; the last one is what no stage has."""
    found = {key.removeprefix("timing_s/") for step in steps for key in step if key.startswith("timing_s/")}
    names = [name for name in STAGES if name in found]
    names += sorted(name for name in found - {"step", *STAGES} if "/" not in name)
    rows = [_row(name, [step.get(f"timing_s/{name}", 0.0) for step in steps], steps) for name in names]
    lost = [step["perf/unaccounted"] * step["timing_s/step"] for step in steps]
    return [*rows, _row(UNACCOUNTED, lost, steps), _row("step", [step["timing_s/step"] for step in steps], steps)]


def _row(name: str, seconds: list[float], steps: list[dict[str, float]]) -> dict[str, Any]:
    whole = sum(step["timing_s/step"] for step in steps)
    return {
        "stage": name,
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "share": sum(seconds) / whole,
    }


def lost_share(steps: list[dict[str, float]]) -> float:
    """Of the time of all steps, outside all stages."""
    whole = sum(step["timing_s/step"] for step in steps)
    return sum(step["perf/unaccounted"] * step["timing_s/step"] for step in steps) / whole


def between_steps(steps: list[dict[str, float]]) -> float:
    """Of the time on the clock from the first step's end to the last one's, what the steps' own time leaves."""
    if len(steps) < 2:
        return 0.0
    wall = steps[-1]["time"] - steps[0]["time"]
    return max(0.0, wall - sum(step["timing_s/step"] for step in steps[1:])) / wall


def tokens_per_second(steps: list[dict[str, float]]) -> float:
    return sum(step["perf/total_num_tokens"] for step in steps) / sum(step["timing_s/step"] for step in steps)


def arithmetic(config: Config, hf: dict[str, Any], critic: dict[str, Any], step: dict[str, float]) -> dict[str, float]:
    """FLOP of each stage of a step, nothing counted twice: what a run of the same tokens cannot do without."""
    tokens = step["perf/total_num_tokens"]
    length = step["prompt_length/mean"] + step["response_length/mean"]  # of a sequence, for its attention
    forward = forward_flops(shape_of(hf), tokens, length)
    found = {"gen": forward, "old_log_prob": forward, "update_actor": 3 * forward * config.actor.ppo_epochs}
    if config.uses_reference:
        found["ref"] = forward
    if config.uses_critic:
        of_critic = forward_flops(shape_of(critic, "critic"), tokens, length)
        found |= {"values": of_critic, "update_critic": 3 * of_critic * config.critic.ppo_epochs}
    return {name: flops for name, flops in found.items() if f"timing_s/{name}" in step}


def shares_of_peak(
    config: Config, hf: dict[str, Any], critic: dict[str, Any], steps: list[dict[str, float]], peak: Peak
) -> dict[str, float]:
    """MFU: of the actor's update, and of the whole step."""
    each = [arithmetic(config, hf, critic, step) for step in steps]
    updates = sum(step.get("timing_s/update_actor", 0.0) for step in steps)
    whole = sum(step["timing_s/step"] for step in steps)
    trained = sum(flops.get("update_actor", 0.0) for flops in each)
    return {
        "mfu": trained / updates / peak.flops if updates else 0.0,
        "mfu_step": sum(sum(flops.values()) for flops in each) / whole / peak.flops,
    }
