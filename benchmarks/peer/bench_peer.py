"""The quickstart's work here and in TRL, in turns: GRPO on the same tiny model and prompts.

    python benchmarks/peer/bench_peer.py --make-environment    once: an environment for TRL, as peer.txt says
    python benchmarks/peer/bench_peer.py                       three rounds of every way, in each of three works
    python benchmarks/peer/bench_peer.py --works small         one of them
    python benchmarks/peer/bench_peer.py --quick               one short run of each way

`small`: prompts of 6 and answers of 16 tokens, `long`: 64 and 64; tokens per second after the start.  `whole`: the
quickstart's 60 iterations from the same cold start, seconds of the whole command with all that the recipe does.
It begins on a quiet machine: it waits for a load below 0.3, ten minutes at most, and says the load that it found.
Both in float32 on the same two cores, never at once, the same batches, answers of one length, and as many optimizer
steps.  Each side may choose how it uses the cores; its faster way counts.  A way that dies is reported and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.execute import CommandFailed, execute
from benchmarks.common.machine import matmul_rate
from benchmarks.common.page import ROOT, Result, arguments, run
from benchmarks.peer.task import Work
from megarl.metrics.reading.jsonl import read_lines
from megarl.servers.server_process import free_ports

HERE = Path(__file__).parent
PINS = HERE / "peer.txt"
PYTHON_VARIABLE = "MEGARL_TRL_PYTHON"
DEFAULT_ENVIRONMENT = Path.home() / ".cache" / "megarl" / "trl"
CORES = 2
WORKS: dict[str, dict[str, Any]] = {
    "small": {"new_tokens": 16},
    "long": {"new_tokens": 64, "prompt_tokens": 64},
    "whole": {"new_tokens": 6, "learns": True, "iterations": 60, "warmup": 0},
}
STAGES = ("gen", "old_log_prob", "ref", "update_actor", "update_weights")


@dataclass(frozen=True)
class Way:
    """How one side uses the cores.  Example: Way("trl", 2, ()): two processes of one thread."""

    side: str  # megarl | trl
    processes: int
    overrides: tuple[str, ...] = ()  # of megarl's configuration
    words: str = ""

    @property
    def name(self) -> str:
        return f"{self.side}, {self.words}"


WAYS = (
    Way("megarl", 2, (), "2 ranks, data parallel"),
    Way(
        "megarl",
        2,
        ("rollout.num_servers=2", "rollout.num_collectors=2"),
        "2 ranks, data parallel, 2 servers, 2 collectors",
    ),
    Way("megarl", 2, ("actor.megatron.tensor_model_parallel_size=2",), "2 ranks, tensor parallel"),
    Way("megarl", 1, (), "1 rank, 2 threads"),
    Way("trl", 1, (), "1 process, 2 threads"),
    Way("trl", 2, (), "2 processes, 1 thread"),
)

CHOICES = (
    "TRL as its documentation would have it on a CPU: use_cpu, float32, sdpa attention, transformers' generate with "
    "its cache (vLLM needs a GPU), no gradient checkpointing, the whole batch in one forward pass, fused AdamW, old "
    "log-probs once for both optimizer steps, a reference model for the KL term, no logging, no checkpoints. "
    "megarl as recipe=quickstart_grpo: server, reward worker and trainer are processes of their own, and every push of "
    "the weights into the server is verified; no evaluation, no checkpoints. In the work `whole` its command does all "
    "that the recipe says, evaluations, checkpoints and export too."
)
LEGEND = (
    "tokens/s: all generated tokens of the iterations after warm-up / the time by the clock from the end of the last "
    "warm-up step to that of the last step, on both sides. of the rate: the FLOPs that the mathematics of an iteration "
    "needs, over its time, as a share of the machine's measured matrix rate in float32 on these cores. peer: the best "
    "way here over TRL's best, the median over the rounds; of each side's ways the one with the best median over these "
    "same rounds counts, which favours the side with more ways (megarl) by a little."
)


# ---- the two sides


def megarl_command(work: Work, way: Way, name: str) -> list[str]:
    """`megarl train` for the work; its run's folder is work.folder/runs/name."""
    if work.learns:  # nothing but where it stands
        where = {"trainer.n_gpus_per_node": way.processes, "trainer.experiment_name": name}
        where |= {"trainer.total_training_steps": work.iterations}
        words = [f"{key}={value}" for key, value in where.items()]
        return [sys.executable, "-m", "megarl", "train", "recipe=quickstart_grpo", *words, *way.overrides]
    settings = {
        "model.path": work.model,
        "data.train_files": f"[{work.data}]",
        "data.val_files": "[]",
        "data.train_batch_size": work.prompts,
        **({"data.max_prompt_length": work.prompt_tokens} if work.prompt_tokens else {}),
        "data.max_response_length": work.new_tokens,
        "rollout.n": work.n,
        "actor.ppo_epochs": work.epochs,
        "actor.kl_loss_coef": work.kl_coef,
        "actor.optim.lr": work.lr,
        "reward.fn": f"{HERE / 'reward.py'}:score",
        "trainer.n_gpus_per_node": way.processes,
        "trainer.total_training_steps": work.iterations,
        "trainer.save_freq": -1,
        "trainer.logger": "[jsonl]",
        "trainer.default_local_dir": f"{work.folder}/runs",
        "trainer.experiment_name": name,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", "megarl", "train", "recipe=quickstart_grpo", *words, *way.overrides]


def trl_command(python: Path, way: Way, task: Path) -> list[str]:
    """TRL's side; several processes are started as its documentation says, by torch's launcher.

    With a static rendezvous, which unpickles nothing; torch's own store listens on all interfaces while it runs.
    """
    script = [str(HERE / "trl_side.py"), str(task)]
    if way.processes == 1:
        return [str(python), *script]
    (port,) = free_ports(["127.0.0.1"])
    meeting = ["--nnodes", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    launcher = ["-m", "torch.distributed.run", *meeting, "--nproc-per-node", str(way.processes)]
    return [str(python), *launcher, *script]


def read_megarl(work: Work, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tokens a second and the stages' mean seconds, of metrics.jsonl."""
    rows = [row for row in rows if "timing_s/step" in row]
    _check_count("iterations", len(rows), work.iterations)
    for row in rows:
        _check_count("tokens of an answer", row["response_length/mean"], work.new_tokens)
    later = rows[work.warmup :]
    seconds = later[-1]["time"] - rows[work.warmup - 1]["time"]  # each row is written when its step has ended
    stages = {name: statistics.mean(row.get(f"timing_s/{name}", 0.0) for row in later) for name in STAGES}
    return {"tokens/s": work.measured / seconds, "iteration_s": seconds / len(later), **stages}


def read_trl(work: Work, said: dict[str, Any]) -> dict[str, Any]:
    """The same, of what trl_side.py wrote; and the versions that it found."""
    check_pins(said["versions"])
    _check_count("optimizer steps", len(said["ends"]), work.iterations * work.epochs)
    for tokens in said["tokens"]:
        _check_count("tokens of an iteration", tokens, work.tokens_per_iteration)
    seconds = said["ends"][-1] - said["ends"][work.warmup * work.epochs - 1]
    mean = seconds / (work.iterations - work.warmup)
    return {"tokens/s": work.measured / seconds, "iteration_s": mean, "versions": said["versions"]}


def check_pins(found: dict[str, str]) -> None:
    """ValueError where TRL's environment is not what peer.txt says; a build's name ("+cpu") is no other version."""
    for name, wanted in pins().items():
        if found[name].partition("+")[0] != wanted:
            raise ValueError(
                f"TRL's environment has {name} {found[name]}, expected {wanted} of {PINS.name}; make it anew "
                "(--make-environment)"
            )


def _check_count(what: str, found: float, wanted: float) -> None:
    if found != wanted:
        raise ValueError(f"{what}: a side did {found:g}, expected {wanted:g}; the comparison would not be one")


def run_side(work: Work, way: Way, python: Path, name: str) -> dict[str, Any]:
    """One run of one side, on the same cores as every other."""
    folder, begun = Path(work.folder), time.perf_counter()
    if way.side == "megarl":
        execute(megarl_command(work, way, name), folder / f"{name}.log", {"PYTHONPATH": str(ROOT)})
        if work.learns:
            return {"command_s": time.perf_counter() - begun}
        return read_megarl(work, list(read_lines(folder / "runs" / name / "metrics.jsonl")))
    task, out = folder / f"{name}.json", folder / f"{name}_out.json"
    threads = work.threads // way.processes
    said = asdict(work) | {"model": work.model, "data": work.data, "out": str(out), "threads": threads}
    task.write_text(json.dumps(said))
    execute(trl_command(python, way, task), folder / f"{name}.log", {"OMP_NUM_THREADS": str(threads)})
    if work.learns:
        return {"command_s": time.perf_counter() - begun}
    return read_trl(work, json.loads(out.read_text()))


# ---- the comparison


def measure(work: Work, ways: Sequence[Way], python: Path, rounds: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Rounds in which every way runs once, the order turned round each time; and the versions of TRL's side.

    A way that fails has a row that says so, and does not run again.
    """
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    left = list(ways)
    for number in range(rounds):
        if {way.side for way in left} != {way.side for way in ways}:
            break  # nothing is left to compare with
        for index, way in enumerate(left if number % 2 == 0 else left[::-1]):
            row: dict[str, Any] = {"round": number + 1, "side": way.side, "way": way.words}
            try:
                found = run_side(work, way, python, f"{way.side}_{number}_{index}")
            except CommandFailed as error:
                left = [other for other in left if other != way]
                rows.append(row | {"failed": str(error)})
                sys.stderr.write(f"round {number + 1}: {way.name} failed: {error}\n")
                continue
            versions |= found.pop("versions", {})
            rows.append(row | found)
            said = f"{found['command_s']:.1f} s" if work.learns else f"{found['tokens/s']:,.0f} tokens/s"
            sys.stderr.write(f"round {number + 1}: {way.name}: {said}\n")
    return rows, versions


def ratios(rows: Sequence[dict[str, Any]], flops: float, rate: float) -> dict[str, float]:
    """Of each side's way with the best median: tokens a second, share of the matrix rate; last, one by the other.

    A way that failed in any round does not count; without a way of each side that ran there is no comparison.
    """
    best = {side: _best(rows, side) for side in ("megarl", "trl")}
    if not all(best.values()):
        return {}
    out = {"matrix_gflops": rate / 1e9}
    for side, mine in best.items():
        seconds = statistics.median(row["iteration_s"] for row in mine)
        out[f"{side}_tokens_per_s"] = statistics.median(row["tokens/s"] for row in mine)
        out[f"{side}_of_matrix_rate"] = flops / seconds / rate
    pairs = zip(best["megarl"], best["trl"], strict=True)
    return out | {"peer": statistics.median(ours["tokens/s"] / theirs["tokens/s"] for ours, theirs in pairs)}


def whole_ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each side's way with the best median: seconds of the command; last, TRL's by ours."""
    rows = [row | ({"tokens/s": 1 / row["command_s"]} if "command_s" in row else {}) for row in rows]
    best = {side: _best(rows, side) for side in ("megarl", "trl")}
    if not all(best.values()):
        return {}
    seconds = {f"{side}_s": statistics.median(row["command_s"] for row in mine) for side, mine in best.items()}
    pairs = zip(best["megarl"], best["trl"], strict=True)
    return seconds | {"peer": statistics.median(theirs["command_s"] / ours["command_s"] for ours, theirs in pairs)}


def _best(rows: Sequence[dict[str, Any]], side: str) -> list[dict[str, Any]]:
    failed = {row["way"] for row in rows if row["side"] == side and "failed" in row}
    ways: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["side"] == side and row["way"] not in failed:
            ways.setdefault(row["way"], []).append(row)
    return max(ways.values(), key=lambda mine: statistics.median(row["tokens/s"] for row in mine), default=[])


def work(options: argparse.Namespace) -> Result | None:
    if options.device != "cpu":
        raise ValueError(f"--device {options.device}: the quickstart's work is a CPU's; expected --device cpu")
    if options.make_environment:
        make_environment(DEFAULT_ENVIRONMENT)
        return None
    python = trl_python()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < CORES:
        raise ValueError(f"{len(cores)} core: expected {CORES}, for both sides to share")
    os.sched_setaffinity(0, cores[:CORES])  # what is started inherits it
    result = Result("peer", "cpu", {}, notes=[CHOICES, LEGEND], title="Beside TRL")
    try:
        rate = matmul_rate("cpu", torch.float32, threads=CORES)
        for name in options.works:
            _add_work(result, name, options, python, rate)
    finally:
        os.sched_setaffinity(0, cores)
    return result


def _add_work(result: Result, name: str, options: argparse.Namespace, python: Path, rate: float) -> None:
    """The rounds of one work; its ratios are called peer, of `small`, or peer_NAME."""
    usual = {"iterations": options.iterations + 3, "warmup": 3} | WORKS[name]
    if options.quick:
        usual |= {"iterations": 4, "warmup": 0 if usual.get("learns") else 1}
    with tempfile.TemporaryDirectory(prefix="bench_peer_") as folder:
        job = Work(folder, threads=CORES, **usual)
        job.write()
        rows, versions = measure(job, WAYS, python, 1 if options.quick else options.rounds)
        flops = 0.0 if job.learns else job.flops()
    for row in (row for row in rows if "iteration_s" in row):
        row["of the rate"] = flops / row["iteration_s"] / rate
    result.rows += [{"work": name, **row} for row in rows]
    found = whole_ratios(rows) if job.learns else ratios(rows, flops, rate)
    end = "" if name == "small" else f"_{name}"
    result.ratios |= {f"{key}{end}": value for key, value in found.items()}
    result.configuration |= {f"{name}: {key}": value for key, value in asdict(job).items() if key != "folder"}
    result.configuration |= {
        "rounds": 1 if options.quick else options.rounds,
        f"{name}: gflop of an iteration": flops / 1e9,
    }
    if versions:
        result.configuration["TRL's side"] = ", ".join(f"{name} {version}" for name, version in versions.items())


# ---- TRL's environment


def trl_python() -> Path:
    """Python of the variable, or of what --make-environment made.  ValueError when there is none."""
    python = Path(os.environ.get(PYTHON_VARIABLE) or DEFAULT_ENVIRONMENT / "bin" / "python")
    if not python.is_file():
        raise ValueError(
            f"{python}: there is no environment with TRL; expected `python benchmarks/peer/bench_peer.py "
            f"--make-environment`, or {PYTHON_VARIABLE} set to the Python of one"
        )
    return python


def make_environment(folder: Path) -> None:
    """A virtual environment with what PINS says; the rest of it as in launch/constraints.txt."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    for words in install_commands(folder / "bin" / "python"):
        subprocess.run(words, check=True)
    sys.stdout.write(f"TRL's environment: {folder} (Python {platform.python_version()})\n")


def install_commands(python: Path) -> list[list[str]]:
    """torch first and alone: a later package must not choose another build of it."""
    install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "launch" / "constraints.txt")]
    return [[*install, "torch"], [*install, "--requirement", str(PINS)]]


def pins() -> dict[str, str]:
    """Example: {"trl": "1.16.0", ...}"""
    lines = [line.split("#")[0].strip() for line in PINS.read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--make-environment", action="store_true", help=f"TRL into {DEFAULT_ENVIRONMENT}, and end")
    made.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS), help="default: all")
    made.add_argument("--iterations", type=int, default=15, help="that the clock counts, of a run (default 15)")
    made.add_argument("--rounds", type=int, default=3, help="runs of each way (default 3)")
    return made


if __name__ == "__main__":
    raise SystemExit(run(work, parser(), needs_quiet=lambda options: not options.make_environment))
