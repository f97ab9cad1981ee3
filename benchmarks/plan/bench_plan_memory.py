"""Memory that the planner predicts for a rank, and what its tensors take, part by part.

    python benchmarks/plan/bench_plan_memory.py                 on CPUs, all layouts, about five minutes on 2 cores
    python benchmarks/plan/bench_plan_memory.py --quick         one process, two cases
    python benchmarks/plan/bench_plan_memory.py --device cuda   one GPU, models of 0.5B, 1.5B and 7B parameters

Random weights, our own engine, two optimizer steps.  On CPUs models are tiny and in float32, and every storage is
counted (common/tensor_memory.py); on a GPU they have their real shape in bf16, and torch's allocator is asked.  A model
that does not fit, as the planner says, has as many layers as fit.  A case that fails is a note.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common import page
from benchmarks.plan.memory_ranks import PARTS, Case, predicted
from benchmarks.plan.rows import preset_config
from megarl.arch.layout import Layout
from megarl.io.sockets import interface_variables
from megarl.mcore.models.execution import has_transformer_engine

GPU_MODELS = ("qwen2_5_0_5b", "qwen2_5_1_5b", "qwen2_5_7b")
TIMEOUT_S = 600.0
SHARE = 0.9  # of the free memory, for what the planner predicts: beside it are CUDA's context and fragments
NOTE = (
    "predicted / measured, in kB of one rank; of ranks that hold as much one is shown. static: weights, gradients and "
    "optimizer. activations: all that a step takes beside these. total: the peak of all tensors."
)


def work(options: argparse.Namespace) -> page.Result:
    on_gpu = options.device == "cuda"
    chosen = gpu_cases(torch.cuda.mem_get_info()[0]) if on_gpu else cases(quick=options.quick)
    chosen = chosen[:1] if on_gpu and options.quick else chosen
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for case in chosen:
        try:
            rows += _rows(case)
        except ValueError as error:
            failed.append(str(error))
    if not rows:
        raise ValueError("; ".join(failed))
    return page.Result(
        theme="plan_memory",
        device=options.device,
        title=f"Predicted and measured memory of training on {'a GPU' if on_gpu else 'CPUs'}",
        configuration={"dtype": chosen[0].dtype, "optimizer": "adamw"},
        rows=rows,
        ratios=ratios(rows),
        notes=[NOTE, *failed],
    )


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How far predictions are off at most, and the median of |log(predicted / measured)|."""
    found = {name: [row[f"{name} predicted / measured"] for row in rows] for name in ("static", "total")}
    said = {f"{end}_{name}": of(each) for name, each in found.items() for end, of in (("least", min), ("most", max))}
    errors = {name: statistics.median(abs(math.log(ratio)) for ratio in each) for name, each in found.items()}
    return said | {f"{name}_median_log_error": error for name, error in errors.items()}


def cases(*, quick: bool = False) -> list[Case]:
    """Each model alone, and in the layouts that cut it."""
    qwen, sparse, deepseek = (preset_config(name) for name in ("qwen3_mini", "qwen3_moe_mini", "deepseek_v3_mini"))
    tp, pp = {"tp": 2, "sequence_parallel": True}, {"pp": 2}
    alone = [Case("qwen3", qwen), Case("qwen3 recomputed", qwen, recompute=True)]
    if quick:
        return alone
    return [
        *alone,
        Case("qwen3 one long sequence", qwen, sequences=1, length=512),
        Case("qwen3 recomputed, 16 sequences", qwen, recompute=True, sequences=16),
        Case("qwen3-moe", sparse),
        Case("qwen3-moe recomputed", sparse, recompute=True),
        Case("deepseek-v3", deepseek),
        Case("deepseek-v3 recomputed", deepseek, recompute=True),
        Case("qwen3 tp2", qwen, tp, 2),
        Case("qwen3 tp2 recomputed", qwen, tp, 2, recompute=True),
        Case("qwen3 pp2 recomputed", qwen, pp, 2, recompute=True, micro_batches=4),
        Case("qwen3 dp2 sharded optimizer", qwen, {"use_distributed_optimizer": True}, 2, recompute=True),
        Case("qwen3 dp2 fsdp", qwen, {"use_distributed_optimizer": True}, 2, fsdp=True),
        Case("qwen3 dp2 fsdp recomputed", qwen, {"use_distributed_optimizer": True}, 2, recompute=True, fsdp=True),
        Case("qwen3-moe ep2 recomputed", sparse, {"ep": 2}, 2, recompute=True),
    ]


def gpu_cases(free_bytes: int) -> list[Case]:
    """Models of real shape, recomputed, two sequences of 4096 tokens; with both kinds of layers where both are here."""
    impls = [True, False] if has_transformer_engine() else [True]
    found = [
        fitting(
            Case(
                f"{preset}, {'local layers' if local else 'Transformer-Engine'}",
                preset_config(preset),
                recompute=True,
                sequences=2,
                length=4096,
                dtype="bfloat16",
                device="cuda",
                local=local,
            ),
            int(SHARE * free_bytes),
        )
        for preset in GPU_MODELS
        for local in impls
    ]
    if not any(found):
        raise ValueError(f"{free_bytes / 1e9:.0f} GB of the GPU are free; expected room for {GPU_MODELS[0]}")
    return [case for case in found if case is not None]


def fitting(case: Case, free_bytes: int) -> Case | None:
    """The case with as many layers as the planner says fit; None if not even one does."""
    layers = case.hf["num_hidden_layers"]
    for fewer in range(layers, 0, -1):
        name = case.name if fewer == layers else f"{case.name}, {fewer} of {layers} layers"
        smaller = replace(case, name=name, hf=case.hf | {"num_hidden_layers": fewer})
        if predicted(smaller, Layout(**case.layout), 0).total <= free_bytes:
            return smaller
    return None


def _rows(case: Case) -> list[dict[str, Any]]:
    """One line for each kind of rank."""
    found = _run(case)
    kinds = found[:: max(1, case.num_ranks // case.layout.get("pp", 1))]
    return [line(case, index, ranks) for index, ranks in enumerate(kinds)]


def line(case: Case, stage: int, found: dict[str, dict[str, int]]) -> dict[str, Any]:
    """A line of the table."""
    predicted, measured = found["predicted"], found["measured"]
    static = PARTS[:3]
    both = {part: f"{predicted[part] / 1e3:.0f} / {measured[part] / 1e3:.0f}" for part in (*PARTS, "total")}
    return {
        "case": case.name,
        "ranks": case.num_ranks,
        "stage": stage,
        "tokens": case.tokens,
        **both,
        "static predicted / measured": round(
            sum(predicted[part] for part in static) / sum(measured[part] for part in static), 4
        ),
        "activations predicted / measured": round(predicted["activations"] / measured["activations"], 4),
        "total predicted / measured": round(predicted["total"] / measured["total"], 4),
    }


def _run(case: Case) -> list[dict[str, dict[str, int]]]:
    """Every rank's numbers, in a world of its own."""
    path = os.pathsep.join([str(page.ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**interface_variables("127.0.0.1"), **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.plan.memory_ranks", json.dumps(asdict(case))]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(case.num_ranks) as threads:
        runs = [[*command, str(rank), f"{folder}/store"] for rank in range(case.num_ranks)]
        run = partial(subprocess.run, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
        try:
            done = list(threads.map(run, runs))
        except subprocess.TimeoutExpired:
            raise ValueError(f"case {case.name}: not done after {TIMEOUT_S:g} s; expected less load") from None
    if failed := [one for one in done if one.returncode]:
        said = [line.strip() for line in failed[0].stderr.splitlines() if "Error" in line] or ["no word of why"]
        raise ValueError(f"case {case.name}: {said[0]}")
    return json.loads(done[0].stdout.strip().splitlines()[-1])


def parser() -> argparse.ArgumentParser:
    return page.arguments(__doc__)


if __name__ == "__main__":
    raise SystemExit(page.run(work, parser()))
