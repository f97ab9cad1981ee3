"""A whole step of training in stages, on the real configuration, with random weights and prompts made here.

    python benchmarks/ring/bench_ring.py                                      the quickstart's sizes, on this machine
    python benchmarks/ring/bench_ring.py recipe=grpo_qwen2_5_72b_8x8h100      on each of its machines, or under srun
    python benchmarks/ring/bench_ring.py recipe=NAME key=value --dry-run      builds, checks and predicts it anywhere
    python benchmarks/ring/bench_ring.py --suite all --dry-run                the standard runs of suite.yaml

What runs is `megarl train`.  Stages are those that the run itself logs; their medians are over the steps after the
first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common import page
from benchmarks.common.execute import end
from benchmarks.common.machine import matmul_rate
from benchmarks.ring.dry_run import dry_run
from benchmarks.ring.job import USUAL, Ring, make_ring
from benchmarks.ring.report import (
    Peak,
    between_steps,
    lost_share,
    read_steps,
    shares_of_peak,
    stage_rows,
    tokens_per_second,
)
from benchmarks.ring.suite import suite
from megarl.arch.gpus import GPUS, find
from megarl.commands.this_machine import placed
from megarl.config import Config
from megarl.plan.from_config import job_of

POLL_S, END_S = 0.2, 300.0
MOST_LOST = 0.01  # of the step, outside all stages


def measure(options: argparse.Namespace) -> page.Result | None:
    """One run, or those of the suite one after the other."""
    if options.suite is None:
        return _one(make_ring(options.words, options), options, [])
    for entry in suite(options.suite):
        own = {"prompt_tokens": entry.prompt_tokens, "response_tokens": entry.response_tokens}
        of_run = argparse.Namespace(**{**vars(options), **own})
        ring = make_ring([*entry.words, *options.words], of_run, name=entry.name)
        result = _one(ring, of_run, entry.anchors)
        if result is not None:
            page.finish(result, options)
    return None


def _one(ring: Ring, options: argparse.Namespace, anchors: list[str]) -> page.Result | None:
    if options.dry_run:
        dry_run(ring, options, anchors)
        return None
    if options.device == "cpu" and ring.given.rollout.engine == "sglang" and ring.given.trainer.device != "cpu":
        raise ValueError(f"{ring.name}: it is a run on GPUs, and torch sees none here; expected --dry-run")
    here = placed(ring.given, os.environ).trainer
    if here.node_rank:  # the driver on the first machine tells this one what to do
        ring.write_settings()
        subprocess.run([sys.executable, "-m", "megarl", "train", *ring.words], check=True)
        return None
    before, begun = os.getloadavg()[0], time.perf_counter()
    config = ring.write()
    found = peak_of(config, options)
    steps = run_steps(ring)
    peak, note = max(found, peak_of(config, options), key=lambda each: each[0].flops if each[0] else 0.0)
    result = result_of(ring, config, options, steps, peak)
    result.load_before, result.took_s = before, time.perf_counter() - begun
    result.notes += ([note] if note else []) + anchors
    return result


def run_steps(ring: Ring) -> list[dict[str, float]]:
    """`megarl train` until it has done the steps; RuntimeErrors of it are a ValueError with the end of its log."""
    ring.metrics.unlink(missing_ok=True)
    log = ring.folder / "train.log"
    command = [sys.executable, "-m", "megarl", "train", *ring.words]
    with log.open("w") as out, Console(stderr=True).status(f"megarl train {ring.name}: {log}") as status:
        run = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while run.poll() is None and len(read_steps(ring.metrics, 0)) < ring.num_steps:
                time.sleep(POLL_S)
                status.update(f"megarl train {ring.name}: {len(read_steps(ring.metrics, 0))} of {ring.num_steps} steps")
        finally:
            end(run, END_S)
    steps = read_steps(ring.metrics, ring.options.warmup)
    if len(steps) < ring.options.steps:
        said = " ".join(log.read_text().split()[-60:])
        raise ValueError(f"megarl train ended after {len(steps)} measured steps; all of it: {log}; its end: {said}")
    return steps[: ring.options.steps]


def peak_of(config: Config, options: argparse.Namespace) -> tuple[Peak | None, str]:
    """The ceiling of the devices, or a sentence that there is none."""
    if options.device == "cpu":
        cores = len(os.sched_getaffinity(0))
        return Peak(matmul_rate("cpu"), cores, f"measured matrix rate of {cores} cores, float32"), ""
    count = job_of(config, next(iter(GPUS.values()))).num_gpus
    name = torch.cuda.get_device_name(0)
    if options.peak_tflops is not None:
        return Peak(options.peak_tflops * 1e12 * count, count, f"--peak-tflops {options.peak_tflops:g}"), ""
    try:
        gpu = find(name)
    except ValueError as error:
        return None, f"no MFU: {error}, or --peak-tflops NUMBER"
    return Peak(
        gpu.bf16_flops * count, count, f"{gpu.bf16_flops / 1e12:.0f} TFLOP/s of each {gpu.name}, dense bf16"
    ), ""


def result_of(
    ring: Ring, config: Config, options: argparse.Namespace, steps: list[dict[str, float]], peak: Peak | None
) -> page.Result:
    """Rows of stages; ratios last."""
    lost, rate = lost_share(steps), tokens_per_second(steps)
    median = statistics.median(step["timing_s/step"] for step in steps)
    job = job_of(config, next(iter(GPUS.values())))
    count = job.num_gpus if options.device == "cuda" else len(os.sched_getaffinity(0))
    configuration = {
        "run": " ".join([ring.recipe or "", *ring.typed]).strip(),
        "ranks": config.trainer.num_ranks,
        "servers": f"{job.num_servers} of rollout.engine={config.rollout.engine}, {config.rollout.placement}",
        "completions of a step": job.sequences,
        "steps": f"{len(steps)} after {options.warmup}",
        "prompt tokens, mean": round(ring.prompt_tokens, 1),
        "limit of a completion": config.data.max_response_length,
    }
    lengths = {key: sum(step[f"{key}_length/mean"] for step in steps) / len(steps) for key in ("prompt", "response")}
    notes = [
        f"lengths that came: prompts {lengths['prompt']:.0f}, completions {lengths['response']:.0f} tokens in the mean",
        f"on the clock between two logged steps, outside what the steps count: {between_steps(steps):.2%}",
    ]
    if lost > MOST_LOST:
        notes.append(f"{lost:.1%} of the step are in no stage, where at most {MOST_LOST:.0%} should be")
    ratios: dict[str, float] = {"step_s": median, "unaccounted": lost, "tokens_per_s": rate}
    if options.device == "cuda":
        ratios["tokens_per_s_per_gpu"] = rate / count
    if peak is not None:
        notes.append(
            f"MFU is of {peak.flops / 1e12:.4g} TFLOP/s: {peak.num_devices} x, {peak.source}; mfu: update_actor"
        )
        ratios |= shares_of_peak(config, ring.numbers("actor"), _critic(ring), steps, peak)
    title = f"A step of {ring.name}"
    rows, machines = stage_rows(steps), config.trainer.nnodes
    theme = f"ring_{ring.name}"
    return page.Result(theme, options.device, configuration, rows, ratios, notes, title, num_machines=machines)


def _critic(ring: Ring) -> dict[str, Any]:
    return ring.numbers("critic") if ring.given.uses_critic else {}


def parser() -> argparse.ArgumentParser:
    made = page.arguments(__doc__)
    made.add_argument("words", nargs="*", help="recipe=NAME key=value ... of megarl train (recipe=quickstart)")
    made.add_argument("--steps", type=int, help="measured steps (5; 2 with --quick)")
    made.add_argument("--warmup", type=int, default=USUAL["warmup"], help="steps before these")
    made.add_argument("--prompt-tokens", type=float, help="mean length; lengths are even in half to 1.5 times it")
    made.add_argument("--response-tokens", type=float, help="mean length of completions (the limit)")
    made.add_argument("--work", type=Path, default=USUAL["work"], help="folder that all machines see")
    made.add_argument("--dry-run", action="store_true", help="build, check and predict; run nothing")
    made.add_argument("--suite", metavar="NAMES", help="runs of suite.yaml: all, or names with commas between")
    made.add_argument("--gpu", help="what --dry-run predicts for (default: what the recipe's name says)")
    made.add_argument("--peak-tflops", type=float, help="dense bf16 TFLOP/s of a GPU that the table has not")
    return made


def main(argv: list[str] | None = None) -> int:
    return page.run(_checked, parser(), argv)


def _checked(options: argparse.Namespace) -> page.Result | None:
    options.steps = options.steps or (2 if options.quick else USUAL["steps"])
    if options.steps < 1 or options.warmup < 0:
        raise ValueError(f"--steps {options.steps}, --warmup {options.warmup}: expected at least 1, and at least 0")
    return measure(options)


if __name__ == "__main__":
    raise SystemExit(main())
