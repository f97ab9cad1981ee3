"""A run that is not run: its real configuration, the modules of its ranks, predictions, and what to type where."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from benchmarks.common.page import terminal
from benchmarks.plan.meta_parameters import built
from benchmarks.ring.job import Ring, gpu_of
from megarl.commands.plan.show import as_json, show
from megarl.plan.from_config import job_of
from megarl.plan.job import Role
from megarl.plan.predict import predict
from megarl.weights.count import of_stage

LAST = ("step_s", "tokens_per_s_per_gpu", "mfu", "bubble", "push_s")  # of the line of JSON


def dry_run(ring: Ring, options: argparse.Namespace, anchors: list[str]) -> None:
    """Print it all, and with --json once more as one line at the end.  ValueError for what cannot be."""
    config = ring.write_settings()
    if ring.is_quickstart:  # its model is made for the run
        config.model.config = ring.numbers("actor")
    mean = options.response_tokens or config.data.max_response_length
    job = job_of(config, gpu_of(options.gpu, ring), prompt_tokens=ring.prompt_tokens, response_tokens=mean)
    began = time.perf_counter()
    stages = [stage for role in job.roles for stage in modules(role)]
    seconds = time.perf_counter() - began
    prediction = predict(job)
    assumed = [] if options.gpu else [f"--gpu {job.gpu.name}, because of the layout's name"]
    most = max(stage["parameters"] for stage in stages)
    console = terminal()

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    line(" ".join(filter(None, [ring.recipe, *ring.typed])))
    show(console, job, prediction, assumed)
    line(
        f"\nbuilt: modules of {len(stages)} stages in {seconds:.1f} s, as planned; a rank has at most {most:,} numbers"
    )
    for sentence in [*anchors, *commands(ring)]:
        line(sentence)
    if options.json:
        said = as_json(job, prediction, assumed) | {"ranks": stages, "anchors": anchors, "commands": commands(ring)}
        last = {key: said.pop(key) for key in LAST}
        sys.stdout.write(json.dumps(said | last) + "\n")


def modules(role: Role) -> list[dict[str, Any]]:
    """The modules of a rank of each pipeline stage, without memory; ValueError where they are not as planned."""
    kind = "critic" if role.name == "critic" else "actor"
    out = []
    for stage in range(role.layout.pp):
        made, planned = built(role.hf, role.layout, stage, kind), of_stage(role.hf, role.layout, stage, kind)
        if made != planned:
            raise ValueError(
                f"{role.name}, stage {stage}: Megatron makes {made.total:,} parameters, planned are {planned.total:,}"
            )
        out.append({"role": role.name, "stage": stage, "parameters": made.total})
    return out


def commands(ring: Ring) -> list[str]:
    """What to type, a line each."""
    typed = [f"node {node}: {command}" for node, command in enumerate(ring.node_commands())]
    own = f"on your own data: {ring.launch_command()}"
    if len(typed) == 1:
        return [*typed, own]
    shared = "machines see the same files and have MEGARL_TOKEN_FILE (launch/node.sh says how); NODE_0 is an address"
    return [shared, *typed, f"under Slurm: {ring.slurm_command()}", own]
