"""Our training step against a bare Megatron-Core loop on the same model and the same tokens.

    python benchmarks/step/bench_step.py --device cpu          a step of seconds
    python benchmarks/step/bench_step.py --device cuda         one GPU, a model of a billion parameters
    python benchmarks/step/bench_step.py --device cuda --wide  six layers of the width of a model of 8B

Both loops stand in one process and step in turns.  The ratio is ours / bare in tokens per second, the median of three
measurements; the goal is 0.97.  On a CPU it waits for a quiet machine, ten minutes at most, else it says so.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import profile, supported_activities

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common import page
from benchmarks.common.machine import matmul_rate
from benchmarks.step.loops import Bare, Ours, Work, cross_entropy_of, make_work
from megarl.arch import gpus
from megarl.arch.hf_config import completed
from megarl.arch.layout import Layout
from megarl.mcore import cpu
from megarl.mcore.setup import backend_of, destroy_groups, make_groups

OURS, BARE = "megarl", "megatron-core"
GOAL = 0.97  # step_vs_megatron
Loops = dict[str, Ours | Bare]
SAME = {"float32": 1e-4, "bfloat16": 2e-2}  # by how much of it the first gradient's norm may differ
LEGEND = (
    "Medians. Ours: rows made from sequences, megarl.mcore.training.step.train_step with log-prob and entropy of each "
    "token, loss layer, statistics, optimizer. Bare: rows that lie ready, GPTModel, vocabulary head, cross entropy, "
    "Megatron's schedule, DistributedDataParallel and optimizer. Both have megarl's attention where Transformer-Engine "
    "is missing, and the patches of megarl/mcore/fixes.py. Their first gradients have the same norm; CPU seconds are "
    "of all threads."
)
# With about the share of arithmetic in the vocabulary head that a model of 8 billion parameters has.
SIZES: dict[str, dict[str, Any]] = {
    "quick": {
        "hidden": 64,
        "heads": 2,
        "head": 32,
        "layers": 2,
        "ffn": 128,
        "vocab": 512,
        "tokens": 256,
        "longest": 64,
        "row": 128,
    },
    "cpu": {
        "hidden": 512,
        "heads": 16,
        "head": 32,
        "layers": 4,
        "ffn": 1536,
        "vocab": 2048,
        "tokens": 4096,
        "longest": 512,
        "row": 2048,
    },
    "cuda": {
        "hidden": 2048,
        "heads": 64,
        "head": 64,
        "layers": 16,
        "ffn": 6144,
        "vocab": 32768,
        "tokens": 65536,
        "longest": 4096,
        "row": 16384,
    },
}
WIDE = {"hidden": 4096, "heads": 32, "head": 128, "layers": 6, "ffn": 14336}


def measure(options: argparse.Namespace) -> page.Result:
    """Warm both up, check that they step alike, and time them in turns."""
    size = _size(options)
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    device = torch.device(options.device)
    dist.init_process_group(backend_of(options.device), store=dist.HashStore(), rank=0, world_size=1)
    try:
        cpu.activate()
        make_groups(Layout())
        work = make_work(model_config(size), lengths_of(size), size["row"], dtype, device)
        ours = Ours(work)
        loops: Loops = {OURS: ours, BARE: Bare(work, ours)}
        norms = {name: loop.step() for name, loop in loops.items()}
        check_alike(norms, dtype)
        times = in_turns(loops, options.repeats or (2 if options.quick else 9), device)
        if options.trace:
            traces(loops, options.out, device)
    finally:
        destroy_groups()
        dist.destroy_process_group()
    return result(options, size, work, norms, times)


def check_alike(norms: dict[str, float], dtype: str) -> None:
    """ValueError where the loops do not do the same."""
    if not math.isclose(norms[OURS], norms[BARE], rel_tol=SAME[dtype]):
        raise ValueError(
            f"the first gradients' norms are {norms[OURS]:.7g} and {norms[BARE]:.7g}; expected the same to "
            f"{SAME[dtype]:g} in {dtype}, else the loops do not do the same"
        )


def in_turns(loops: Loops, repeats: int, device: torch.device) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each step, and what all threads computed in them; who begins changes from turn to turn."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for turn in range(repeats):
        for name in sorted(loops, reverse=turn % 2 == 1):
            _wait(device)
            begun, busy = time.perf_counter(), time.process_time()
            loops[name].step()
            _wait(device)
            times[name].append((time.perf_counter() - begun, time.process_time() - busy))
    return times


def traces(loops: Loops, out: Path, device: torch.device) -> None:
    """Write the timeline of one step of each loop, step_LOOP.json.gz; Perfetto and chrome://tracing open it."""
    for name, loop in loops.items():
        with profile(activities=supported_activities()) as timeline:
            loop.step()
            _wait(device)
        timeline.export_chrome_trace(str(out / f"step_{name}.json.gz"))


def result(
    options: argparse.Namespace,
    size: dict[str, Any],
    work: Work,
    norms: dict[str, float],
    times: dict[str, list[tuple[float, float]]],
) -> page.Result:
    dtype = torch.bfloat16 if work.dtype == "bfloat16" else torch.float32
    rate = matmul_rate(options.device, dtype, threads=torch.get_num_threads())
    peak, notes = gpu_peak(options.device)
    flops, num_tokens = step_flops(size, work.batch.lengths.tolist()), work.batch.num_tokens
    walls = {name: [wall for wall, _ in pairs] for name, pairs in times.items()}
    busy = {name: statistics.median(cpu for _, cpu in pairs) for name, pairs in times.items()}
    median = {name: statistics.median(seconds) for name, seconds in walls.items()}
    rows = [
        {
            "loop": name,
            "seconds": median[name],
            "fastest": min(seconds),
            "slowest": max(seconds),
            "CPU seconds": busy[name],
            "tokens/s": num_tokens / median[name],
            "of the matrix rate": flops / median[name] / rate,
            **({"MFU": flops / median[name] / peak} if peak else {}),
            "first gradient norm": norms[name],
        }
        for name, seconds in walls.items()
    ]
    configuration = {
        **size,
        "dtype": work.dtype,
        "sequences of each row": str(work.micro_sizes),
        "threads": torch.get_num_threads(),
        "cross entropy of the bare loop": cross_entropy_of(work.device)[0],
        "repeats": len(walls[OURS]),
        "goal": GOAL,
        "matrix rate, GFLOP/s": round(rate / 1e9, 1),
        "share of the head in the arithmetic": round(head_share(size), 3),
    }
    turns = [bare / ours for ours, bare in zip(walls[OURS], walls[BARE], strict=True)]
    ratios = {"step_lowest_of_a_turn": min(turns), "step_highest_of_a_turn": max(turns)}
    if options.device == "cpu":
        ratios["step_vs_megatron_cpu_time"] = busy[BARE] / busy[OURS]
    ratios["step_vs_megatron"] = median[BARE] / median[OURS]
    return page.Result(
        "step", options.device, configuration, rows, ratios, [LEGEND, *notes], "Our training step and Megatron's"
    )


def gpu_peak(device: str) -> tuple[float | None, list[str]]:
    """The dense bf16 FLOP/s of the GPU's data sheet, and what the page says of it; None where it is not known."""
    if device == "cpu":
        return None, []
    try:
        gpu = gpus.find(torch.cuda.get_device_name())
    except ValueError as error:
        return None, [f"no MFU: {error}"]
    return gpu.bf16_flops, [f"MFU: of the {gpu.bf16_flops / 1e12:.0f} TFLOP/s of {gpu.name}'s data sheet"]


def model_config(size: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a Qwen3."""
    numbers = {
        "model_type": "qwen3",
        "hidden_size": size["hidden"],
        "intermediate_size": size["ffn"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["heads"] // 2,
        "head_dim": size["head"],
        "hidden_act": "silu",
        "vocab_size": size["vocab"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "max_position_embeddings": 2 * size["longest"],
        "tie_word_embeddings": False,
    }
    return completed(numbers)


def lengths_of(size: dict[str, Any]) -> list[int]:
    """Lengths between a quarter of the longest and the longest, which together are `tokens`."""
    draw, lengths, left = random.Random(0), [], size["tokens"]
    while left > 0:
        length = min(left, draw.randint(size["longest"] // 4, size["longest"]))
        if left - length == 1:  # a sequence of one token predicts nothing
            length += 1 if length < size["longest"] else -1
        lengths.append(length)
        left -= length
    return lengths


def step_flops(size: dict[str, Any], lengths: list[int]) -> float:
    """Forwards and backwards, nothing done twice: three times two for each weight and token, and causal attention."""
    hidden, attention = size["hidden"], sum(length**2 for length in lengths)
    inner = model_config(size)["num_attention_heads"] * model_config(size)["head_dim"]
    weights = size["layers"] * _layer_weights(size) + hidden * size["vocab"]
    return 6.0 * weights * sum(lengths) + 6.0 * size["layers"] * inner * attention


def head_share(size: dict[str, Any]) -> float:
    head = size["hidden"] * size["vocab"]
    return head / (head + size["layers"] * _layer_weights(size))


def _layer_weights(size: dict[str, Any]) -> int:
    numbers, hidden = model_config(size), size["hidden"]
    heads = 2 * numbers["num_attention_heads"] + 2 * numbers["num_key_value_heads"]
    return hidden * heads * numbers["head_dim"] + 3 * hidden * size["ffn"]


def _size(options: argparse.Namespace) -> dict[str, Any]:
    size = SIZES["quick" if options.quick else options.device] | (WIDE if options.wide else {})
    size |= {key: getattr(options, key) for key in size if getattr(options, key) is not None}
    if size["longest"] > size["row"] or size["longest"] > size["tokens"]:
        raise ValueError(
            f"--longest {size['longest']}: expected at most --row {size['row']} and --tokens {size['tokens']}"
        )
    if size["heads"] % 2 or min(size.values()) < 1 or size["longest"] < 8:
        raise ValueError(
            f"--heads {size['heads']}, --longest {size['longest']}: expected an even number, and at least 8"
        )
    return size


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def parser() -> argparse.ArgumentParser:
    made = page.arguments(__doc__)
    about = {
        "row": "tokens of a packed row",
        "tokens": "of a step",
        "longest": "of a sequence",
        "head": "numbers of a head",
    }
    for key in SIZES["quick"]:
        made.add_argument(f"--{key}", type=int, help=about.get(key, "of the model"))
    made.add_argument("--wide", action="store_true", help=f"the model is {WIDE}")
    made.add_argument("--trace", action="store_true", help="also the timeline of one step of each loop")
    made.add_argument("--repeats", type=int, help="timed steps of each loop (9; 2 with --quick)")
    made.add_argument("--threads", type=int, help="CPU threads (all cores)")
    return page.with_rounds(made)


if __name__ == "__main__":
    raise SystemExit(page.run(page.in_rounds(measure), parser(), needs_quiet=page.on_cpu))
