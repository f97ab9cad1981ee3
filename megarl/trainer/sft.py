"""Supervised fine-tuning on prompts and responses, with the actor of the RL loop: packed rows, prompts masked out.

The loss is REINFORCE with an advantage of 1 on every response token: -log p, averaged over the step's response tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megarl.algo.loss import ActorLoss
from megarl.config import Config
from megarl.data.chat import load_tokenizer
from megarl.data.prompts import RowSettings
from megarl.data.sft import SftExamples
from megarl.io.durable_files import kept
from megarl.io.terminal import sentences
from megarl.metrics.computing.samples import write_summary
from megarl.metrics.computing.stats import finalise
from megarl.metrics.computing.timer import Timer
from megarl.metrics.reading.jsonl import Series, read_series
from megarl.metrics.trackers.console import warn
from megarl.metrics.trackers.trackers import Trackers
from megarl.processes import watchdog
from megarl.processes.signals import Signals
from megarl.roles.handles import Actor
from megarl.roles.settings import LoadSettings, Packing, Update
from megarl.samples.batch import Batch
from megarl.trainer.bad_numbers import BadNumbers, spikes_of
from megarl.trainer.build import (
    engine_settings,
    make_group,
    model_folder,
    num_token_ids,
    optim_settings,
    stop_ids,
)
from megarl.trainer.checkpoint.checkpoint import Checkpoint, to_resume
from megarl.trainer.checkpoint.resume import announce, require_state
from megarl.trainer.infrastructure import Infrastructure
from megarl.trainer.resumable import Attempt, Plan, SaveTimes, due, open_trackers, own_folder, take_up, to_the_end
from megarl.trainer.telemetry.profile import check_profile, profiled

VAL_LOSS = "val/loss"
AVERAGED = 5  # losses of steps, whose batches differ
LEARNT = 0.05  # a loss below it
METRICS = {"sft/loss": "actor/pg_loss", "sft/grad_norm": "actor/grad_norm", "sft/lr": "actor/lr"}
METRICS |= {f"sft/mtp_{name}": f"actor/mtp_{name}" for name in ("loss", "acceptance")}


def sft(config: Config) -> dict[str, Any]:
    """Train for trainer.total_training_steps or sft.epochs, write `hf/` into the run's folder, return the summary.

    Resumes, and starts failed ranks again, as `megarl train` does.  Raises Terminated after SIGTERM.
    """
    trainer = config.trainer
    with own_folder(config):
        with Signals(trainer.term_grace_s) as signals:
            examples = read_examples(config, "sft.train_files", config.sft.train_files)
            held_out = read_examples(config, "sft.val_files", config.sft.val_files) if config.sft.val_files else None
            steps = training_steps(config, examples)
            with watchdog.watch(), Infrastructure(config, serves=False) as infrastructure:
                resume = to_resume(trainer, warn)
                plan = SftPlan(config, steps, resume, examples, held_out, examples.state_dict())
                opened = partial(open_sft, infrastructure=infrastructure, signals=signals)
                summary = to_the_end(plan, opened, SftRun.train, signals, infrastructure)
        metrics = trainer.run_dir / "metrics.jsonl"
        if metrics.exists() and (sentence := hardly_moved(read_series(metrics), config.actor.optim.lr)):
            warn(sentence)
        write_summary(trainer.run_dir / "summary.json", summary)
        return summary


def training_steps(config: Config, examples: SftExamples) -> int:
    """Optimizer steps of the training.  Raises ValueError for none."""
    sft = config.sft
    steps = config.trainer.total_training_steps or sft.epochs * len(examples) // sft.batch_size
    if steps < 1:
        raise ValueError(
            f"sft.batch_size={sft.batch_size}: there are {len(examples)} examples in {sft.epochs} epochs; use a "
            "smaller batch or more epochs"
        )
    return steps


def hardly_moved(series: Series, lr: float) -> str:
    """A sentence if the loss of a training of ten steps or more has not fallen by 2 %; "" otherwise.

    That of the held-out examples counts, if there is one; else the mean of the last five steps, against the first five.
    A loss that is near 0 from the start has nothing left to learn.
    """
    _, losses = series.get("sft/loss", ([], []))
    _, held_out = series.get(VAL_LOSS, ([], []))
    if len(losses) < 2 * AVERAGED:
        return ""
    before, after = sum(losses[:AVERAGED]) / AVERAGED, sum(losses[-AVERAGED:]) / AVERAGED
    name, ends = "sft/loss", (before, after)
    if len(held_out) > 1:
        name, ends = VAL_LOSS, (held_out[0], held_out[-1])
    if ends[0] < LEARNT or ends[1] < 0.98 * ends[0]:
        return ""
    return (
        f"{name} was {ends[0]:.4f} at first and is {ends[1]:.4f} now: the model has learnt nothing of these examples; "
        f"try a larger actor.optim.lr (it was {lr:g}), more sft.epochs, or look whether the responses fit the prompts"
    )


@dataclass(frozen=True)
class SftPlan(Plan):
    """The plan of `megarl sft`."""

    examples: SftExamples
    held_out: SftExamples | None
    fresh: Mapping[str, Any]  # the state of the examples before any was used


@dataclass(kw_only=True)
class SftRun(Attempt):
    """A training from its start, or from the resumed save, to the exported model."""

    plan: SftPlan
    actor: Actor
    trackers: Trackers
    timer: Timer
    state: dict[str, Any]  # that a checkpoint holds
    began: float  # by time.monotonic(), less the time of the runs that this one continues

    def train(self) -> dict[str, Any]:
        """All steps, each with what is due after it; returns the summary."""
        plan = self.plan
        trainer = self.plan.config.trainer
        signals = self.signals
        signals.is_patient = True
        if plan.first_step == 0 and trainer.val_before_train:
            self._evaluate(0)
        self.timer.start()  # the startup does not count as part of the first step
        for step in range(plan.first_step, plan.num_steps):
            self.between_steps(step, partial(self._save, step))
            self._step(step)
            ends = signals.ends  # one that comes later waits for the next step
            if self.times.due(step + 1):
                self._save(step + 1)
            self.saver.poll()
            if ends:
                self.end(step + 1)
            if step + 1 == plan.num_steps or due(step + 1, trainer.test_freq):
                self._evaluate(step + 1)
        self.finish_saves()
        self.trackers.stage("writing the model")
        hf = plan.folder / "hf"
        kept(hf, lambda: self.actor.export(hf))
        wall_s = round(time.monotonic() - self.began, 1)
        summary = {"steps": plan.num_steps, "loss": self.state["loss"], "wall_s": wall_s}
        return summary | ({"val_loss": self.state.get("val_loss")} if plan.held_out is not None else {})

    def _step(self, step: int) -> None:
        """One optimizer step; without metrics of the loss if it was skipped."""
        timer = self.timer
        self.bad_numbers.begin(step + 1)
        with profiled(self.plan.config.trainer.profile, [self.actor.group], self.plan.folder, step + 1, timer):
            with timer("update"):
                batch = supervised(self.plan.examples.take(self.plan.config.sft.batch_size))
                _, stats = self.actor.update(batch, seed=step)
                numbers = finalise(stats)
            metrics = {ours: numbers[name] for ours, name in METRICS.items() if name in numbers}
            metrics |= timer.finish(num_tokens=batch.num_tokens)
        self.finished_steps = step + 1
        self.trackers.log(step + 1, metrics | self.bad_numbers.metrics)
        self.state["loss"] = metrics.get("sft/loss", self.state["loss"])
        self.state["spikes"] = spikes_of({"actor": self.actor})

    def _save(self, step: int) -> None:
        with self.timer("save_checkpoint"):
            self.saver.start(step)
        now = {"examples": self.plan.examples.state_dict(), "wall_s": time.monotonic() - self.began}
        self.saver.describe(self.state | now)

    def _evaluate(self, step: int) -> None:
        if self.plan.held_out is None:
            return
        self.trackers.stage("testing")
        began = time.monotonic()
        self.state["val_loss"] = loss_of(self.actor, self.plan.held_out, self.plan.config.sft.batch_size)
        times = {"timing_s/testing": time.monotonic() - began}
        self.trackers.log(step, {VAL_LOSS: self.state["val_loss"]} | times)
        self.timer.start()


@contextmanager
def open_sft(plan: SftPlan, infrastructure: Infrastructure, signals: Signals) -> Iterator[SftRun]:
    """Start the ranks, and restore the save at which the training begins."""
    config = plan.config
    resume = plan.resume
    folder = plan.folder
    state: dict[str, Any] = dict(_state_of(resume)) if resume else {"loss": None, "wall_s": 0.0, "examples": plan.fresh}
    with ExitStack() as stack:
        if resume is not None:
            announce(resume, config, plan.num_steps)
        plan.examples.load_state_dict(state["examples"])
        (folder / "summary.json").unlink(missing_ok=True)  # only a finished run has one
        bad_numbers = BadNumbers(config.trainer.on_nonfinite, folder)
        trackers = open_trackers(plan, stack)
        began = time.monotonic() - state["wall_s"]
        trackers.stage("starting ranks")
        group = make_group(config, config.actor, "ranks_0", nodes=infrastructure.nodes)
        stack.enter_context(group).start()
        limits = config.actor.ppo_max_token_len_per_gpu, config.actor.ppo_micro_batch_size_per_gpu
        packing = Packing(*limits, share_prefixes=config.trainer.share_prefixes)
        update = Update(ActorLoss("reinforce", mtp_coef=config.actor.mtp_coef), prompts_per_step=config.sft.batch_size)
        actor = Actor("actor", group, packing, update_settings=update)
        settings = LoadSettings(
            config.model.dtype,
            optim=optim_settings(config.actor, plan.num_steps),
            engine=engine_settings(config.actor),
            reads_weights=resume is None,
            mtp=config.actor.mtp,
        )
        actor.load(model_folder(config.model.path), settings)
        check_profile(config.trainer.profile, plan.num_steps, [group])
        yield SftRun(
            plan=plan,
            infrastructure=infrastructure,
            signals=signals,
            bad_numbers=bad_numbers,
            saver=take_up(plan, {"actor": actor}, bad_numbers, stack),
            times=SaveTimes(config.trainer, signals, first_step=plan.first_step, num_steps=plan.num_steps),
            finished_steps=plan.first_step,
            actor=actor,
            trackers=trackers,
            timer=Timer(on_stage=trackers.stage),
            state=state,
            began=began,
        )


@torch.inference_mode()
def loss_of(actor: Actor, examples: SftExamples, batch_size: int) -> float:
    """-log p of a response token, averaged over all response tokens of the examples."""
    total, count = 0.0, 0.0
    for batch in examples.batches(batch_size):
        mask = batch.columns["response_mask"]
        total -= float((actor.log_probs(batch) * mask).sum())
        count += float(mask.sum())
    return total / count


def read_examples(config: Config, key: str, files: Sequence[str]) -> SftExamples:
    """The examples of these files; prints a line on what became of the rows."""
    sft = config.sft
    settings = RowSettings(
        sft.max_length,
        prompt_key=sft.prompt_key,
        max_row_bytes=config.data.max_row_bytes,
        seed=config.data.seed,
        overlong=sft.overlong_rows,
        system_prompt=config.data.system_prompt,
        template=config.data.apply_chat_template_kwargs,
        num_ids=num_token_ids(config),
    )
    found = SftExamples(
        files,
        load_tokenizer(model_folder(config.model.tokenizer_path)),
        settings,
        response_key=sft.response_key,
        answers=sft.answers,
        stop_ids=stop_ids(model_folder(config.model.path)),
    )
    sentences().print(f"{key}=[{', '.join(files)}]: {found.said}")
    if found.strange_ends:
        warn(
            f"{key}: the chat template ends answers with {', '.join(found.strange_ends)}, at which servers of "
            f"model.path={config.model.path} do not stop; eos_token_id of its generation_config.json says where they do"
        )
    return found


def _state_of(resumed: Checkpoint) -> dict[str, Any]:
    """Raises ValueError for a checkpoint of `megarl train`, and for one of an earlier version of megarl."""
    if "examples" not in resumed.state:
        raise ValueError(
            f"trainer.resume_mode: {resumed.folder} is not of `megarl sft`; expected one that is, another "
            "trainer.experiment_name, or trainer.resume_mode=disable"
        )
    require_state(resumed, resumed.state, ("loss", "wall_s", "spikes"))
    return resumed.state


def supervised(batch: Batch) -> Batch:
    """Add the columns with which REINFORCE is the cross entropy: advantages 1, old log-probs 0."""
    ones, zeros = torch.ones(batch.num_tokens), torch.zeros(batch.num_tokens)
    groups = torch.arange(batch.num_sequences)
    return replace(batch, per_sequence={"group": groups}).with_columns(advantages=ones, old_log_probs=zeros)
