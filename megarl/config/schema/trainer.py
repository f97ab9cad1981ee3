"""Keys of a run's length, machines, output folder, logging and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megarl.config import names
from megarl.config.schema.record import (
    BASIC,
    EXPERT,
    RL,
    RL_EVALUATE,
    RL_SFT,
    AtLeast1,
    AtLeast10,
    Choices,
    Count,
    If,
    Natural,
    Period,
    Port,
    Ports,
    Positive,
    Ranks,
    Seed,
    Steps,
    key,
)

MACHINES = If("trainer.nnodes != 1")
PROFILES = If(".steps != []")
TOOLS = Choices(names.PROFILERS)
LISTENS = If("other machines connect")
VAL = If("data.val_files != []")
SCORES = If("data.val_files != []", "trainer.test_freq != -1")
EVALUATES = If("data.val_files != [] or sft.val_files != []")
PROMETHEUS = If("trainer.logger has prometheus")


@dataclass
class Profile:
    """A profile of some steps, written by some ranks into `profile/` of the run's folder."""

    steps: Steps = key([], "iterations, counted from 1, that are profiled; [] = none")
    ranks: Ranks = key([0], "ranks of each group that write a profile", PROFILES)
    tool: str = key(
        "torch", "a trace of torch's profiler, or ranges for Nsight Systems (nvtx, on GPUs)", TOOLS, PROFILES
    )
    memory: bool = key(False, "write a snapshot of the GPU memory's history, too", PROFILES)


@dataclass
class Trainer:
    project_name: str = key("megarl", "project in the trackers")
    recipe: str | None = key(
        None, "recipe of the command, set by itself: the run's page shows what differs from it", EXPERT
    )
    experiment_name: str = key("run", "name of the run's folder inside default_local_dir", BASIC)
    default_local_dir: str = key("runs", "folder of all runs")
    total_training_steps: Count | None = key(None, "iterations; null = total_epochs", BASIC)
    total_epochs: Count = key(1, "passes over the prompts", If(".total_training_steps == null"), RL_EVALUATE)
    nnodes: Count = key(1, "machines of the run", BASIC)
    node_rank: Natural | None = key(None, "number of this machine; null = as the scheduler's variables say", MACHINES)
    master_addr: str = key("127.0.0.1", "address of machine 0, for the rendezvous of the other machines", MACHINES)
    master_port: Port | None = key(
        None,
        "port of the driver on machine 0; null = 29500, or a free one, kept in the run's folder",
        MACHINES,
        EXPERT,
    )
    ports: Ports | None = key(
        None, "ports for other machines, but not of gloo and NCCL, as 41000-41999; null = any", LISTENS, EXPERT
    )
    private_network: bool = key(
        False,
        "orders are not encrypted, and servers with rollout.tls=auto use http: a network of the run alone",
        LISTENS,
    )
    spare_nodes: Natural = key(
        0, "machines that wait, numbered from nnodes on, until one of the others is lost", MACHINES, RL_SFT
    )
    n_gpus_per_node: Count = key(1, "training ranks per machine; processes on a machine without a GPU", BASIC)
    device: str = key("auto", "where ranks compute", Choices(names.DEVICES), BASIC)
    logger: list[str] = key(["console", "jsonl"], "names of trackers, as docs/outputs.md has them; jsonl always")
    prometheus_host: str = key(
        "127.0.0.1", "address of this machine where prometheus in trainer.logger serves /metrics", PROMETHEUS
    )
    prometheus_port: Port = key(9464, "port of the Prometheus page", PROMETHEUS)
    share_prefixes: str = key(
        "auto", "compute common beginnings of rows once; auto = on CPUs, not yet on GPUs", Choices(names.SHARES)
    )
    token_samples: Natural = key(2, "samples of each iteration that tokens.jsonl keeps token by token; 0 = none", RL)
    save_freq: Period = key(
        -1, "iterations between checkpoints; -1 = none, but those that a signal asks for", RL_SFT, BASIC
    )
    save_every_s: Positive | None = key(
        None, "seconds after a save in which the next one is due, beside save_freq; null = never", RL_SFT
    )
    failed_saves: Natural = key(
        3, "after so many saves that fail in a row the run waits for room to save, then ends; 0 = never", RL_SFT, EXPERT
    )
    term_grace_s: Positive = key(
        20.0, "after SIGTERM the running iteration may end and be saved within so many seconds", RL_SFT
    )
    async_save: bool = key(True, "checkpoints are copied to host memory and written while the training goes on")
    test_freq: Period = key(-1, "iterations between evaluations; -1 = none", EVALUATES, BASIC)
    eval_beside: bool = key(
        False, "evaluate while the trainer works on the next step; servers have their own GPUs", VAL, RL
    )
    val_before_train: bool = key(True, "evaluate before the first iteration", EVALUATES)
    resume_mode: str = key(
        "auto", "auto (the newest whole checkpoint of this run), disable, or the folder of a checkpoint"
    )
    verify_resume: bool = key(
        True, "compare the SHA-256 of all files before a resume, too", If(".resume_mode != disable"), EXPERT
    )
    share_results: bool = key(
        False, "hf/, adapter/, report.html, README.md, answers.md, summary.json get your umask's permissions", RL_SFT
    )
    trust_shared_folders: bool = key(
        False, "the run's folder and the saves to resume from may be such as others can change", EXPERT
    )
    on_nonfinite: str = key(
        "stop", "what NaN or a spike does: skip the step, or go to a checkpoint", Choices(names.ON_NONFINITE), RL_SFT
    )
    spike_sigma: Positive | None = key(
        None, "deviations of gradient norm or loss above its running mean that are a spike; null = no spikes", RL_SFT
    )
    critic_warmup: Natural = key(
        0, "iterations at the start in which only the critic is trained", If("there is a critic"), RL_EVALUATE
    )
    seed: Seed = key(0, "seed of everything random: weights, order of the data, completions", BASIC)
    check_export: bool = key(
        False, "score the written hf/ with transformers' generation, too", VAL, RL_EVALUATE, EXPERT
    )
    max_checkpoints_to_keep: Count = key(2, "number of newest checkpoints to keep; older ones are removed")
    keep_every_steps: Period = key(
        -1, "checkpoints after a multiple of so many iterations are never removed; -1 = none"
    )
    keep_best: Natural = key(
        0, "number of checkpoints to keep besides, of the best validation scores", SCORES, RL_EVALUATE
    )
    prepare: str | None = key(
        None, "module or .py file with prepare(config), which makes missing folders of models", RL_EVALUATE, EXPERT
    )
    max_restarts: Natural | None = key(
        None, "how often failed ranks restart without a new step in between; null = 3 with checkpoints, else 0", RL_SFT
    )
    profile: Profile = key(Profile, "profile of some steps", RL_SFT)
    check_only: bool = key(False, "look at layouts, memory, plug-ins, data, rewards, models; start nothing", BASIC)
    call_timeout_s: Positive = key(
        600.0, "time limit of a call to the ranks, of their start, and of a silent server", EXPERT
    )
    call_factor: AtLeast1 = key(
        5.0, "a call may take so many times as long as the longest of its kind in this run so far", RL_SFT, EXPERT
    )
    silence_s: AtLeast10 = key(
        60.0, "a rank or machine that gives no sign for this long counts as hung; signs come every 2 s", RL_SFT, EXPERT
    )

    @property
    def num_machines(self) -> int:
        """Machines of the run, with the spare ones."""
        return self.nnodes + self.spare_nodes

    @property
    def num_ranks(self) -> int:
        """Training ranks over all machines."""
        return self.nnodes * self.n_gpus_per_node

    @property
    def saves(self) -> bool:
        """Whether checkpoints are saved without being asked for."""
        return self.save_freq > 0 or self.save_every_s is not None

    @property
    def run_dir(self) -> Path:
        """The folder that holds all files of this run."""
        return Path(self.default_local_dir) / self.experiment_name
