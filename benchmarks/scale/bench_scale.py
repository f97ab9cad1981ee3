"""What it costs to lead many ranks: a call of a Group and a training step at 1 to 8 ranks here, and at 10,000.

    python benchmarks/scale/bench_scale.py --json
    python benchmarks/scale/bench_scale.py --ranks 1 2 4 --hollow-nodes 8 125 1249

Three kinds of rows.  `ranks` are ranks of a run, with a model.  `hollow` are machines without ranks that
answer for them: the driver and what it does are real, at any number.  `model` is a simulation with the costs of a
message that were measured here (simulation.py), which is compared with the other two and then asked about a cluster,
whose network is assumed (--hop-us, --gbit) and where every process has a core.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.page import ROOT, Result, arguments, run
from benchmarks.scale.costs import (
    Call,
    below_costs,
    hollow_call,
    hollow_group,
    hop_s,
    leader_costs,
    leader_holds,
    timed_calls,
    together,
)
from benchmarks.scale.hollow import Nothing
from benchmarks.scale.picture import draw
from benchmarks.scale.simulation import Costs, Leader, Outcome, Tree, Way, call
from megarl.algo.loss import ActorLoss
from megarl.arch.layout import Layout
from megarl.data.examples.tiny import write_tiny_model
from megarl.group import Group, GroupSettings
from megarl.io.callers import allow_all_files
from megarl.processes.channels.waiting import HEARTBEAT_S
from megarl.roles.handles import Actor
from megarl.roles.settings import LoadSettings, Packing, Update
from megarl.samples.batch import Batch

SIZES: dict[str, Any] = {
    "ranks": [1, 2, 4, 8],
    "hollow_nodes": [1, 8, 64, 250, 625, 1249],
    "repeats": 30,
    "step_tokens": 8192,
}
QUICK: dict[str, Any] = {"ranks": [1], "hollow_nodes": [2, 4], "repeats": 3, "step_tokens": 256}
SIMULATED = (8, 64, 256, 512, 1024, 2048, 4096, 10_000)
MEMORY = "driver's MB"
TENSOR_BYTES = 1 << 20  # to each replica, in calls with tensors
LENGTH = 64  # tokens of a sequence
# A step of the simulated job: so many tokens a rank, so many optimizer steps, and log-probs of two models.
STEP = {"tokens_per_rank": 8192, "updates": 16, "columns": 2, "replica": 64}
DOWN_BYTES, UP_BYTES = 20, 4  # of a token: its id and the loss's four columns; a column


def real_rows(count: int, folder: Path, model: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """An empty call, one with tensors, and a training step of so many ranks; the same tokens however many these are."""
    logs = folder / f"ranks_{count}"
    settings = GroupSettings(device=options.device, worker="benchmarks.scale.ranks")
    with Group("ranks", count, Layout(), settings, log_dir=logs) as group:
        group.start()
        empty = timed_calls(lambda: group.call(Nothing()), options.repeats)
        tensors = [{"x": torch.zeros(TENSOR_BYTES, dtype=torch.uint8)}] * group.num_replicas
        loaded = timed_calls(lambda: group.call(Nothing(), tensors), max(3, options.repeats // 4))
        actor = Actor("actor", group, Packing(max_tokens=2048), update_settings=Update(ActorLoss(), 1))
        dtype = "bfloat16" if options.device == "cuda" else "float32"
        actor.load(str(model), LoadSettings(dtype, optim={"lr": 1e-5, "betas": [0.9, 0.999]}))
        steps = _steps(actor, options.step_tokens, max(2, options.repeats // 6))
    return [
        {"kind": "ranks", "what": "empty call", "ranks": count, **_measured(empty)},
        {"kind": "ranks", "what": "1 MiB a replica", "ranks": count, **_measured(loaded)},
        {
            "kind": "ranks",
            "what": "training step",
            "ranks": count,
            "seconds": steps,
            "of it calls": empty.seconds / steps,
        },
    ]


def _steps(actor: Actor, num_tokens: int, repeats: int) -> float:
    """The median optimizer step of these tokens, after a first one."""
    batch = _batch(max(1, num_tokens // LENGTH))
    seconds = []
    for step in range(repeats + 1):
        begun = time.perf_counter()
        actor.update(batch, seed=step)
        seconds.append(time.perf_counter() - begun)
    return median(seconds[1:])


def _batch(num: int) -> Batch:
    """Sequences of random tokens, all of one group: one optimizer step."""
    generator = torch.Generator().manual_seed(0)
    total = num * LENGTH
    columns = {"old_log_probs": torch.full((total,), -4.0), "advantages": torch.randn(total, generator=generator)}
    columns["response_mask"] = (torch.arange(total) % LENGTH >= LENGTH // 4).float()
    tokens = torch.randint(6, 100, (total,), generator=generator)
    return Batch(tokens, torch.full((num,), LENGTH), columns, {"group": torch.zeros(num, dtype=torch.int64)})


def _measured(found: Call) -> dict[str, Any]:
    return {"seconds": found.seconds, "driver's": found.leader_s}


def _predicted(found: Outcome) -> dict[str, Any]:
    return {"model": found.seconds, "model's driver": found.leader_s}


def here(hop: float, *, hollow: bool) -> Way:
    """This machine: its cores for all."""
    return Way(hop, 0.0 if hollow else hop, cores=len(os.sched_getaffinity(0)), one_relay=hollow)


def hollow_rows(
    nodes: int, folder: Path, costs: Costs, as_relay: Costs, hop: float, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """An empty call to so many hollow machines of 8 ranks, beside what the model says of it."""
    per_node = options.per_node
    tree = Tree(nodes * per_node, per_node, beside=False)
    with hollow_group(nodes, per_node, folder / f"hollow_{nodes}", replica=per_node) as (group, pid):
        found = hollow_call(group, pid, max(3, options.repeats // 3))
    mixed = replace(together(as_relay, costs), rank=0.0, relay_down=0.0)
    said = call(tree, mixed, here(hop, hollow=True))
    row = {"kind": "hollow", "what": "empty call", "ranks": tree.num_ranks, **_measured(found), **_predicted(said)}
    return [{**row, "model/measured": said.seconds / found.seconds}]


def simulated_rows(costs: Costs, way: Way, leader: Leader, per_node: int) -> list[dict[str, Any]]:
    """A cluster: an empty call, and all calls of a step with their tensors."""
    rows = []
    for count in SIMULATED:
        tree = Tree(count, per_node, replica=min(count, STEP["replica"]))
        empty, step = call(tree, costs, way), step_of(tree, costs, way)
        row = {"kind": "model", "ranks": count}
        rows.append({**row, "what": "empty call", **_predicted(empty)})
        held = {MEMORY: leader.memory(tree) / 1e6, "sockets": leader.sockets(tree)}
        rows.append({**row, "what": "calls of a step", **_predicted(step), **held})
    return rows


def step_of(tree: Tree, costs: Costs, way: Way) -> Outcome:
    """All calls of one iteration: log-probs of all its tokens by two models, the optimizer steps, an empty one."""
    tokens = STEP["tokens_per_rank"] * tree.num_ranks // tree.num_replicas  # a replica
    part = tokens // STEP["updates"]
    columns = call(tree, costs, way, down=tokens * UP_BYTES, up=tokens * UP_BYTES)
    update, push = call(tree, costs, way, down=part * DOWN_BYTES), call(tree, costs, way)
    found = [(columns, STEP["columns"]), (update, STEP["updates"]), (push, 1)]
    return Outcome(*(sum(times * getattr(o, name) for o, times in found) for name in ("seconds", "leader_s")))


def work(options: argparse.Namespace) -> Result:
    sizes = QUICK if options.quick else SIZES
    if options.device == "cuda":
        sizes = {**sizes, "ranks": [n for n in sizes["ranks"] if n <= torch.cuda.device_count()]}
    for name, value in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    _check(options)
    per_node = options.per_node
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = Result("scale", options.device, {}, title="Leading many ranks")
    with tempfile.TemporaryDirectory(prefix="bench_scale_") as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model")
        middle = max(2, options.hollow_nodes[len(options.hollow_nodes) // 2])
        leader = leader_holds(folder / "holds", nodes=middle, per_node=per_node)  # first: later, memory is left over
        driver, as_relay = leader_costs(
            folder / "costs", nodes=middle, per_node=per_node, num_bytes=TENSOR_BYTES, repeats=options.repeats
        )
        costs = together(driver, below_costs(per_node=per_node, num_bytes=TENSOR_BYTES, repeats=options.repeats))
        hop = hop_s(options.repeats)
        for nodes in options.hollow_nodes:
            result.rows += hollow_rows(nodes, folder, costs, as_relay, hop, options)
        for count in options.ranks:
            result.rows += [_beside(row, costs, hop) for row in real_rows(count, folder, model, options)]
    cluster = Way(options.hop_us * 1e-6, hop, options.gbit * 1e9 / 8)
    result.rows += simulated_rows(costs, cluster, leader, per_node)
    result.configuration |= _configuration(options, costs, hop, leader)
    _say(result, beats=max(SIMULATED) / HEARTBEAT_S * costs.take)
    result.draw = partial(draw, result.rows)
    return result


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError for what this machine, or the arithmetic, does not allow."""
    if options.per_node < 2:
        raise ValueError(f"--per-node {options.per_node}: expected at least 2, costs are told apart by it")
    allow_all_files()
    if options.device == "cuda" and max(options.ranks) > (gpus := torch.cuda.device_count()):
        raise ValueError(f"--ranks {max(options.ranks)}: expected at most {gpus}, one for each GPU")


def _beside(row: dict[str, Any], costs: Costs, hop: float) -> dict[str, Any]:
    """What the model says of the same call."""
    if row["what"] == "training step":
        return row
    down = TENSOR_BYTES if row["what"] != "empty call" else 0
    said = call(Tree(row["ranks"], row["ranks"]), costs, here(hop, hollow=False), down=down)
    return {**row, **_predicted(said), "model/measured": said.seconds / row["seconds"]}


def _configuration(options: argparse.Namespace, costs: Costs, hop: float, leader: Leader) -> dict[str, Any]:
    cluster = f"{options.hop_us:g} us from process to process, {options.gbit:g} Gbit/s for the driver (assumed)"
    return {
        "a message's costs, us": ", ".join(f"{k} {1e6 * v:.1f}" for k, v in asdict(costs).items() if "byte" not in k),
        "a byte's costs, ns": ", ".join(f"{k} {1e9 * v:.2f}" for k, v in asdict(costs).items() if "byte" in k),
        "a hop on this machine, us": round(1e6 * hop, 1),
        "a machine more, for the driver": f"{leader.node_bytes / 1e3:.0f} kB, {leader.node_sockets:.0f} sockets, "
        f"{leader.node_threads:.0f} threads",
        "ranks on a machine": options.per_node,
        "cluster": cluster,
        "step of the cluster": ", ".join(f"{k} {v}" for k, v in STEP.items()),
        "tokens of a measured step": options.step_tokens,
        "repeats": options.repeats,
    }


def _say(result: Result, *, beats: float) -> None:
    """What the rows come to; `beats`: the share of the driver's time that goes into signs of life."""
    checked = [row["model/measured"] for row in result.rows if "model/measured" in row]
    largest = [row for row in result.rows if row["kind"] == "model" and row["ranks"] == max(SIMULATED)]
    empty, step = (next(row for row in largest if row["what"] == what) for what in ("empty call", "calls of a step"))
    result.ratios = {
        "model_over_measured_least": min(checked),
        "model_over_measured_most": max(checked),
        "calls_s": step["model"],
        "model_off_error": abs(math.log(median(checked))),
    }
    result.notes += [
        f"model / measured: {median(checked):.3f} in the median, whose |logarithm| is model_off_error; calls_s: of all "
        f"calls of a step at {max(SIMULATED)} ranks",
        f"model, {max(SIMULATED)} ranks: an empty call {empty['model']:.3f} s; all calls of a step with their tensors "
        f"{step['model']:.2f} s; the driver holds {step[MEMORY]:.0f} MB and {step['sockets']} sockets",
        f"while {max(SIMULATED)} ranks work, what they say of being alive costs the driver {beats:.1%} of a core",
        "left out by the model: tensors inside a replica (its own network), and what ranks do in a call",
    ]


def parser() -> argparse.ArgumentParser:
    found = arguments(__doc__)
    found.add_argument("--ranks", nargs="+", type=int, help="of a run, with a model (default 1 2 4 8)")
    found.add_argument("--hollow-nodes", nargs="+", type=int, help="machines without ranks (default up to 1249)")
    found.add_argument("--per-node", type=int, default=8, help="ranks of a machine (default 8)")
    found.add_argument("--repeats", type=int, help="of every call (default 30)")
    found.add_argument("--step-tokens", type=int, help="of a measured training step (default 8192)")
    found.add_argument("--hop-us", type=float, default=50.0, help="of the cluster's network (default 50)")
    found.add_argument("--gbit", type=float, default=25.0, help="of the driver's link there (default 25)")
    return found


if __name__ == "__main__":
    raise SystemExit(run(work, parser()))
