"""Prints a prediction: tables of 80 columns for people, or one JSON object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megarl.arch.layout import Layout
from megarl.plan.job import Job
from megarl.plan.predict import Prediction
from megarl.plan.report import AXES, HOST, LOCAL, memory_table, plain_table, print_line
from megarl.plan.search import Proposal, seconds_text
from megarl.weights.count import whole

WIDTH = 74


def show(console: Console, job: Job, prediction: Prediction, assumed: Sequence[str]) -> None:
    """Print the prediction of a run."""
    print_line(console, headline(job))
    for line in assumed:
        print_line(console, f"assumed: {line}")
    for setting in job.not_modelled:
        print_line(console, f"not modelled: {setting}")
    budget = job.gpu.memory_bytes / 1e9
    print_line(console, f"\npredicted GB of a rank of each kind, at its fullest (a GPU has {budget:.0f})")
    console.print(memory_table(prediction.memory, prediction.local_totals))
    print_line(console, HOST)
    if prediction.local_totals:
        print_line(console, LOCAL)
    step = f"{job.sequences} completions, {job.tokens / 1e6:.1f} million tokens"
    print_line(console, f"\npredicted seconds of a step of {step}")
    console.print(_stages(prediction))
    print_line(console, "")
    console.print(_numbers(prediction))
    print_line(console, "")
    print_line(console, "it fits" if prediction.fits else "IT DOES NOT FIT")
    for line in prediction.why:
        print_line(console, f"- {line}")


def show_proposals(console: Console, own: Prediction, proposals: Sequence[Proposal]) -> None:
    """Print the results of a search."""
    print_line(console, "")
    if not proposals:
        nothing = "no layout that fits is faster than this one by more than a hundredth"
        none_fits = "no layout on these GPUs that leaves what was typed fits either; use more of them, or larger ones"
        print_line(console, f"searched: {nothing if own.fits else none_fits}")
        return
    faster = ", and are predicted to be faster" if own.fits else ""
    print_line(console, f"searched: these fit{faster}; type the words behind the command")
    for at, one in enumerate(proposals, 1):
        new = one.prediction
        gain = f", {own.step_s / new.step_s:.2f} times as fast" if own.fits else ""
        tokens = f"{new.tokens_per_s_per_gpu:.0f} tokens/s/GPU"
        layout = layout_words(one.job.actor.layout)
        print_line(console, f"\n{at}. {layout}: {seconds_text(new.step_s)} s a step, {tokens}{gain}")
        console.print(Padding(Text(one.why), (0, 0, 0, 3)))
        for line in _pasted(one.words):
            console.print(f"   {line}", markup=False, highlight=False, soft_wrap=True)


def headline(job: Job) -> str:
    """The run in a few lines."""
    kind = f"{_parameters(whole(job.actor.hf))} on {job.num_gpus} x {job.gpu.name}"
    links = f"a GPU sends {job.gpu.link_bandwidth / 1e9:g} GB/s inside its machine, {_gbit(job):g} Gbit/s beyond"
    place = "the trainer's GPUs, in turns" if job.shared else "GPUs of their own"
    groups = f" in {job.attention_dp} attention groups" if job.attention_dp > 1 else ""
    servers = f"{job.num_servers} server{'s' if job.num_servers > 1 else ''} of {job.server_gpus}{groups} on {place}"
    lengths = f"mean lengths {job.prompt_tokens:.0f} + {job.response_tokens:.0f} of at most {job.longest}"
    return f"{kind}, {job.gpus_per_node} a machine\n{links}\n{layout_words(job.actor.layout)}; {servers}\n{lengths}"


def _parameters(count: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.1f} {word} parameters"
    return f"{count:,} parameters"


def _gbit(job: Job) -> float:
    return job.gpu.nic_bandwidth * 8 / 1e9


def layout_words(layout: Layout) -> str:
    """Example: "tp 4, pp 4, vpp 2"; sizes of 1 are left out."""
    sizes = {axis: getattr(layout, "expert_tp" if axis == "etp" else axis) for axis in AXES}
    if layout.ep == 1 or sizes["etp"] == layout.tp:
        del sizes["etp"]
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank a replica"


def as_json(job: Job, prediction: Prediction, assumed: Sequence[str]) -> dict[str, Any]:
    """The whole prediction, in GB and seconds."""
    budgets = prediction.memory.items()
    return {
        "fits": prediction.fits,
        "memory_gb": {kind: {part: round(size / 1e9, 2) for part, size in budget.items()} for kind, budget in budgets},
        "memory_local_gb": {kind: round(size / 1e9, 2) for kind, size in prediction.local_totals.items()},
        "fits_local": prediction.fits_local,
        "step_s": round(prediction.step_s, 2),
        "tokens_per_s_per_gpu": round(prediction.tokens_per_s_per_gpu, 2),
        "mfu": round(prediction.mfu, 4),
        "mfu_step": round(prediction.mfu_step, 4),
        "bubble": round(prediction.bubble, 4),
        "push_s": round(prediction.push_s, 3),
        "computed_tokens": {name: round(tokens) for name, tokens in prediction.computed_tokens.items()},
        "stages": {name: round(seconds, 3) for name, seconds in prediction.stages.items()},
        "micro_batches": prediction.micro_batches,
        "concurrency": round(prediction.concurrency, 1),
        "gpu": job.gpu.name,
        "num_gpus": job.num_gpus,
        "gpus_per_node": job.gpus_per_node,
        "link_gb_s": round(job.gpu.link_bandwidth / 1e9, 3),
        "nic_gbit_s": round(_gbit(job), 3),
        "layout": {axis: getattr(job.actor.layout, "expert_tp" if axis == "etp" else axis) for axis in AXES},
        "recompute": job.actor.recompute,
        "max_tokens": job.actor.max_tokens,
        "servers": {
            "num": job.num_servers,
            "gpus": job.server_gpus,
            "ep": job.server_ep,
            "shared": job.shared,
            "attention_dp": job.attention_dp,
            "precision": job.server_precision,
        },  # fmt: skip
        "prompt_tokens": job.prompt_tokens,
        "response_tokens": job.response_tokens,
        "parameters": whole(job.actor.hf),
        "assumed": list(assumed),
        "not_modelled": list(job.not_modelled),
        "why": prediction.why,
    }


def proposal_json(proposal: Proposal) -> dict[str, Any]:
    """A proposal of a search."""
    return {"words": proposal.words, "reason": proposal.why, **as_json(proposal.job, proposal.prediction, ())}


def _pasted(words: Sequence[str]) -> list[str]:
    """The words wrapped to the width of a narrow terminal, ready to paste into a shell."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > WIDTH:
            lines.append("")
        lines[-1] += f"{word} "
    return [*(f"{line}\\" for line in lines[:-1]), lines[-1].rstrip()]


def _stages(prediction: Prediction) -> Table:
    table = plain_table("stage", "s", "share")
    total = sum(prediction.stages.values())
    for name, seconds in prediction.stages.items():
        table.add_row(name, f"{seconds:.1f}", f"{seconds / total:.0%}")
    table.add_row("step", f"{prediction.step_s:.1f}", "")
    return table


def _numbers(prediction: Prediction) -> Table:
    idle = f"idle pipeline, with {prediction.micro_batches} micro-batches a replica"
    rows = (
        ("tokens/s/GPU", f"{prediction.tokens_per_s_per_gpu:.0f}", "all tokens of a step, prompts included"),
        ("MFU", f"{prediction.mfu:.1%}", "of the actor's training"),
        ("MFU of the step", f"{prediction.mfu_step:.1%}", "the same operations over the whole step, on all GPUs"),
        ("bubble", f"{prediction.bubble:.1%}", idle),
        ("push", f"{prediction.push_s:.1f} s", "until every server has the new weights"),
        ("at a time", f"{prediction.concurrency:.0f}", "completions that a full server generates"),
    )
    table = plain_table("", "", "")
    table.show_header = False
    table.columns[2].justify = "left"
    for row in rows:
        table.add_row(*row)
    return table
