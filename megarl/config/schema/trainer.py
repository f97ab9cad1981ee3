"""Keys of a run's length, machines, output folder, logging and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Profile:
    """A profile of some steps, written by some ranks into `profile/` of the run's folder."""

    steps: list[int] = field(default_factory=list)  # iterations, counted from 1, that are profiled; [] = none
    ranks: list[int] = field(default_factory=lambda: [0])  # ranks of each group that write a profile
    tool: str = "torch"  # torch (a trace of torch's profiler) | nvtx (ranges for Nsight Systems, on GPUs)
    memory: bool = False  # also a snapshot of the GPU memory's history


@dataclass
class Trainer:
    project_name: str = "megarl"  # project in the trackers
    recipe: str | None = None  # the recipe of the command, set by itself: the run's page shows what differs from it
    experiment_name: str = "run"  # the run's folder inside default_local_dir
    default_local_dir: str = "runs"  # folder of all runs
    total_training_steps: int | None = None  # iterations; null = total_epochs
    total_epochs: int = 1  # passes over the prompts
    nnodes: int = 1  # machines of the run
    node_rank: int = 0  # number of this machine
    master_addr: str = "127.0.0.1"  # address of machine 0, for the rendezvous of the other machines
    master_port: int | None = (
        None  # port of the driver on machine 0; null = 29500, or a free one, which the run's folder tells the others
    )
    spare_nodes: int = 0  # machines that wait, numbered from nnodes on, until one of the others is lost
    n_gpus_per_node: int = 1  # training ranks per machine; processes on a machine without a GPU
    device: str = "auto"  # auto | cpu | cuda
    logger: list[str] = field(
        default_factory=lambda: ["console", "jsonl"]
    )  # console mlflow prometheus tensorboard wandb, jsonl always
    prometheus_port: int = 9464  # of 127.0.0.1, where prometheus in trainer.logger serves /metrics
    share_prefixes: str = (
        "auto"  # on | off | auto (on CPUs; nobody has measured it on GPUs): common beginnings of rows are computed once
    )
    token_samples: int = 2  # samples of each iteration that tokens.jsonl keeps token by token; 0 = none
    save_freq: int = -1  # iterations between checkpoints; -1 = none, but those that a signal asks for
    save_every_s: float | None = (
        None  # seconds after a save in which the next one is due, beside save_freq; null = never
    )
    term_grace_s: float = 20.0  # after SIGTERM the running iteration may end and be saved within so many seconds
    async_save: bool = True  # checkpoints are copied to host memory and written while the training goes on
    test_freq: int = -1  # iterations between evaluations; -1 = none
    eval_beside: bool = False  # evaluations go on while the trainer works on the next step; servers have their own GPUs
    val_before_train: bool = True  # evaluate before the first iteration
    resume_mode: str = "auto"  # auto (the newest whole checkpoint of this run) | disable | folder of a checkpoint
    verify_resume: bool = True  # before a resume the SHA-256 of all its files is compared; sizes always are
    on_nonfinite: str = "stop"  # what NaN or a spike does: stop | skip (the step) | rollback (to the last checkpoint)
    spike_sigma: float | None = (
        None  # deviations of gradient norm or loss above its running mean that are a spike; null = there are none
    )
    critic_warmup: int = 0  # iterations at the start in which only the critic is trained
    seed: int = 0  # of everything random: weights, order of the data, completions
    check_export: bool = False  # at the end, also score the written hf/ with transformers' generation (small models)
    max_checkpoints_to_keep: int = 2  # number of newest checkpoints to keep; older ones are removed
    keep_every_steps: int = -1  # checkpoints after a multiple of so many iterations are never removed; -1 = none
    keep_best: int = 0  # number of checkpoints to keep besides, of the best validation scores
    prepare: str | None = (
        None  # module or .py file; its prepare(config) makes folders of the policy and of teachers if one is missing
    )
    max_restarts: int | None = (
        None  # how often failed ranks are restarted without a new step in between; null = 3 with checkpoints, else 0
    )
    profile: Profile = field(default_factory=Profile)
    check_only: bool = False  # look at layouts, memory, plug-ins, data, rewards, models; start nothing
    start_timeout_s: float = 600.0  # the run stops if ranks take longer to import and to meet
    call_timeout_s: float = 600.0  # a call to the ranks may take so long at most; a server may be silent as long
    call_factor: float = 5.0  # a call may take so many times as long as the longest of its kind in this run so far
    call_floor_s: float = 120.0  # but every call may take this long, or call_timeout_s if that is less
    driver_silence_s: float = (
        1800.0  # machine 0 ends itself when its loop does not go on for this long; waits with limits of their own go on
    )
    silence_s: float = 60.0  # a rank or machine that gives no sign for this long counts as hung; signs come every 2 s

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
