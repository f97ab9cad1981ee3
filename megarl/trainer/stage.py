"""The loop that `megarl sft`, `dpo` and `rm` share: steps on rows of files, resumed and started again as a run is."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from megarl.algo.loss import ActorLoss
from megarl.algo.pairs import PairLoss
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
from megarl.roles.handles import Actor, Critic
from megarl.roles.settings import LoadSettings, Packing, Update
from megarl.samples.batch import Batch
from megarl.trainer.bad_numbers import BadNumbers, spikes_of
from megarl.trainer.build import (
    engine_settings,
    lora_settings,
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

AVERAGED = 5  # losses of steps, whose batches differ
LEARNT = 0.05  # a loss below it
COIN = 0.55  # an accuracy on pairs up to it: a coin has 0.5
STAGE = "stage"  # in the state of a save: the command; one of `megarl sft` has none
START = "start"  # in the same: the model.path with which what is trained is compared


class Stage(ABC):
    """What one of these commands has of its own: its rows, its model and loss, and what it measures."""

    name: ClassVar[str]  # of the command
    role: ClassVar[str]  # of the model that is trained
    handle: ClassVar[type[Actor] | type[Critic]] = Actor
    rows: ClassVar[type[SftExamples]]
    to_its_end: ClassVar[bool] = False  # see SftExamples
    agg_mode: ClassVar[str]
    logged: ClassVar[Mapping[str, str]]  # what is logged of a step -> the statistic of the update

    @abstractmethod
    def loss(self, config: Config) -> ActorLoss | PairLoss:
        """The loss of an optimizer step."""

    @abstractmethod
    def prepared(self, batch: Batch) -> Batch:
        """Examples with what the update reads."""

    @abstractmethod
    def measured(self, model: Any, held_out: Any, config: Config) -> dict[str, float]:
        """What is logged of the held-out rows, with the names of the log; val/loss is one."""

    def check(self, examples: Any, config: Config) -> None:  # noqa: B027
        """Raises ValueError for rows with which it cannot train; warns of what it does not read of them."""

    def compares(self, config: Config) -> bool:  # noqa: ARG002
        """Whether `begin` is called, in a run that resumes too."""
        return False

    def begin(self, model: Any, plan: StagePlan, told: Callable[[int, int], None]) -> None:  # noqa: B027
        """What is asked of the model with the weights of model.path, before a save is restored and the first step.

        `told` gets how much of it is done, and how much there is.
        """


def run_stage(stage: Stage, config: Config) -> dict[str, Any]:
    """Train for trainer.total_training_steps or sft.epochs, write `hf/` into the run's folder, return the summary.

    Resumes, and starts failed ranks again, as `megarl train` does.  Raises Terminated after SIGTERM.
    """
    trainer = config.trainer
    with own_folder(config):
        with Signals(trainer.term_grace_s) as signals:
            examples, held_out = (
                read_examples(stage, config, f"sft.{name}", files) if files else None
                for name, files in (("train_files", config.sft.train_files), ("val_files", config.sft.val_files))
            )
            assert examples is not None, "the configuration has sft.train_files"
            stage.check(examples, config)
            steps = training_steps(config, examples)
            with watchdog.watch(), Infrastructure(config, serves=False) as infrastructure:
                resume = to_resume(trainer, warn)
                plan = StagePlan(config, steps, resume, stage, examples, held_out, examples.state_dict())
                opened = partial(open_stage, infrastructure=infrastructure, signals=signals)
                summary = to_the_end(plan, opened, StageRun.train, signals, infrastructure)
        metrics = trainer.run_dir / "metrics.jsonl"
        if metrics.exists() and (said := hardly_moved(read_series(metrics), config.actor.optim.lr, stage.name)):
            warn(said)
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


def hardly_moved(series: Series, lr: float, stage: str = "sft") -> str:
    """A sentence if a training of ten steps or more has learnt nothing; "" otherwise.

    Pairs: if hardly more of them are in order than by a coin.  Their loss rises again when it overfits, while the
    order, which is what is wanted, may still be right.  Otherwise: if the loss has not fallen by 2 %; one that is near
    0 from the start has nothing left to learn.
    The held-out examples count, if there are any; else the mean of the last five steps, against the first five.
    """
    measure = "accuracy" if f"{stage}/accuracy" in series else "loss"
    name, held_out = f"{stage}/{measure}", series.get(f"val/{measure}", ([], []))[1]
    steps = series.get(name, ([], []))[1]
    if len(steps) < 2 * AVERAGED:
        return ""
    before, after = sum(steps[:AVERAGED]) / AVERAGED, sum(steps[-AVERAGED:]) / AVERAGED
    if len(held_out) > 1:
        name, before, after = f"val/{measure}", held_out[0], held_out[-1]
    if after > COIN if measure == "accuracy" else before < LEARNT or after < 0.98 * before:
        return ""
    return (
        f"{name} was {before:.4f} at first and is {after:.4f} now: the model has learnt nothing of these examples; "
        f"try a larger actor.optim.lr (it was {lr:g}), more sft.epochs, or look whether the responses fit the prompts"
    )


@dataclass(frozen=True)
class StagePlan(Plan):
    """The plan of such a training."""

    stage: Stage
    examples: SftExamples
    held_out: SftExamples | None
    fresh: Mapping[str, Any]  # the state of the examples before any was used


@dataclass(kw_only=True)
class StageRun(Attempt):
    """A training from its start, or from the resumed save, to the exported model."""

    plan: StagePlan
    model: Actor | Critic
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
        kept(hf, lambda: self.model.export(hf))
        wall_s = round(time.monotonic() - self.began, 1)
        summary = {"steps": plan.num_steps, "loss": self.state["loss"], "wall_s": wall_s}
        measured = {name: number for name, number in self.state.items() if name.startswith("val_")}
        return summary | ({"val_loss": None} | measured if plan.held_out is not None else {})

    def _step(self, step: int) -> None:
        """One optimizer step; without metrics of the loss if it was skipped."""
        timer, stage = self.timer, self.plan.stage
        self.bad_numbers.begin(step + 1)
        with profiled(self.plan.config.trainer.profile, [self.model.group], self.plan.folder, step + 1, timer):
            with timer("update"):
                batch = stage.prepared(self.plan.examples.take(self.plan.config.sft.batch_size))
                _, stats = self.model.update(batch, seed=step)
                numbers = finalise(stats)
            metrics = {ours: numbers[name] for ours, name in stage.logged.items() if name in numbers}
            metrics |= timer.finish(num_tokens=batch.num_tokens)
        self.finished_steps = step + 1
        self.trackers.log(step + 1, metrics | self.bad_numbers.metrics)
        self.state["loss"] = metrics.get(f"{stage.name}/loss", self.state["loss"])
        self.state["spikes"] = spikes_of({stage.role: self.model})

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
        measured = self.plan.stage.measured(self.model, self.plan.held_out, self.plan.config)
        self.state |= {name.replace("/", "_"): number for name, number in measured.items()}
        self.trackers.log(step, measured | {"timing_s/testing": time.monotonic() - began})
        self.timer.start()


@contextmanager
def open_stage(plan: StagePlan, infrastructure: Infrastructure, signals: Signals) -> Iterator[StageRun]:
    """Start the ranks, and restore the save at which the training begins."""
    config = plan.config
    resume = plan.resume
    folder = plan.folder
    stage = plan.stage
    start = config.model.path
    state: dict[str, Any] = {"loss": None, "wall_s": 0.0, "examples": plan.fresh}
    state |= ({STAGE: stage.name} if stage.name != "sft" else {}) | ({START: start} if stage.compares(config) else {})
    if resume is not None:
        state = dict(_state_of(resume, stage))
        if state.get(START, start) != start:
            raise ValueError(
                f"model.path={start}: {resume.folder} is compared with the model that it began with, {state[START]}; "
                "expected that one, or another trainer.experiment_name"
            )
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
        update = Update(stage.loss(config), prompts_per_step=config.sft.batch_size, agg_mode=stage.agg_mode)
        model = stage.handle(stage.role, group, packing, update_settings=update)
        lora = lora_settings(config)
        settings = LoadSettings(
            config.model.dtype,
            optim=optim_settings(config.actor, plan.num_steps),
            lora=lora,
            engine=engine_settings(config.actor),
            reads_weights=resume is None or lora is not None or stage.compares(config),
            mtp=config.actor.mtp,
        )
        model.load(model_folder(config.model.path), settings)
        check_profile(config.trainer.profile, plan.num_steps, [group])
        if stage.compares(config):
            stage.begin(model, plan, partial(trackers.stage, "reference"))
        yield StageRun(
            plan=plan,
            infrastructure=infrastructure,
            signals=signals,
            bad_numbers=bad_numbers,
            saver=take_up(plan, {stage.role: model}, bad_numbers, stack),
            times=SaveTimes(config.trainer, signals, first_step=plan.first_step, num_steps=plan.num_steps),
            finished_steps=plan.first_step,
            model=model,
            trackers=trackers,
            timer=Timer(on_stage=trackers.stage),
            state=state,
            began=began,
        )


def read_examples(stage: Stage, config: Config, key: str, files: Sequence[str]) -> SftExamples:
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
    found = stage.rows(
        files,
        load_tokenizer(model_folder(config.model.tokenizer_path)),
        settings,
        response_key=sft.response_key,
        answers=sft.answers,
        stop_ids=stop_ids(model_folder(config.model.path)),
        to_its_end=stage.to_its_end,
    )
    sentences().print(f"{key}=[{', '.join(files)}]: {found.said}")
    if found.strange_ends:
        warn(
            f"{key}: the chat template ends answers with {', '.join(found.strange_ends)}, at which servers of "
            f"model.path={config.model.path} do not stop; eos_token_id of its generation_config.json says where they do"
        )
    return found


def _state_of(resumed: Checkpoint, stage: Stage) -> dict[str, Any]:
    """Raises ValueError for a checkpoint of another command, and for one of an earlier version of megarl."""
    if "examples" not in resumed.state or resumed.state.get(STAGE, "sft") != stage.name:
        raise ValueError(
            f"trainer.resume_mode: {resumed.folder} is not of `megarl {stage.name}`; expected one that is, another "
            "trainer.experiment_name, or trainer.resume_mode=disable"
        )
    require_state(resumed, resumed.state, ("loss", "wall_s", "spikes"))
    return resumed.state
