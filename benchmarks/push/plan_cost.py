"""What it costs a rank to plan its own transfers for a model of a trillion parameters."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from megarl.arch.boxes import box_size
from megarl.weights.mapping.families import table_for
from megarl.weights.mapping.server_map import server_table
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import MegatronSharding, ServerSharding

# Qwen3-MoE's shape at the size of the largest open models of 2025.
TRILLION: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 7168,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_experts": 384,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 163840,
}
TRAINER = {"world_size": 1024, "tp": 8, "pp": 8, "ep": 32, "etp": 1}  # dp = 16
SERVERS = {"tp": 32, "ep": 32, "num_replicas": 8}
MESSAGE_BYTES = 64 << 20


class PlanCost(NamedTuple):
    """Seconds and memory are those of the most expensive rank that was tried."""

    parameters: int
    ranks_tried: int
    cpu_seconds: float
    extra_bytes: int  # by which the process grew
    messages: int


def plan_cost(num_ranks: int = 2) -> PlanCost:
    """Plan for `num_ranks` senders and as many receivers, from the first to the last, each in a process of its own."""
    places = [i / max(1, num_ranks - 1) for i in range(num_ranks)]
    ranks = [(True, round(p * (TRAINER["world_size"] - 1))) for p in places]
    ranks += [(False, round(p * (SERVERS["tp"] * SERVERS["num_replicas"] - 1))) for p in places]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        tried = pool.starmap(plan_of, ranks, chunksize=1)
    shapes = [shape for op in table_for(TRILLION) for shape in op.hf_shapes.values()]
    parameters = sum(box_size(tuple((0, n) for n in shape)) for shape in shapes)
    return PlanCost(parameters, len(tried), *(max(column) for column in zip(*tried, strict=True)))


def plan_of(is_sender: bool, rank: int) -> tuple[float, int, int]:
    """CPU seconds, bytes by which this process grew, messages of a rank."""
    before, begun = psutil.Process().memory_info().rss, time.process_time()
    trainer = MegatronSharding(
        tuple(table_for(TRILLION)),
        world_size=TRAINER["world_size"],
        tp=TRAINER["tp"],
        pp=TRAINER["pp"],
        ep=TRAINER["ep"],
        etp=TRAINER["etp"],
    )
    table = tuple(server_table("sglang", TRILLION))
    servers = ServerSharding(table, tp=SERVERS["tp"], ep=SERVERS["ep"], num_replicas=SERVERS["num_replicas"])
    plan = Plan(trainer, servers)
    messages = plan.messages_out(rank, MESSAGE_BYTES) if is_sender else plan.messages_in(rank, MESSAGE_BYTES)
    seconds = time.process_time() - begun
    return seconds, _most_memory() - before, len(messages)


def _most_memory() -> int:
    """The most that this process ever had (getrusage would count its parent, too, from which it was forked)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
