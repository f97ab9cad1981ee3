"""Supervised fine-tuning on prompts and responses, with the actor of the RL loop: packed rows, prompts masked out.

The loss is REINFORCE with an advantage of 1 on every response token: -log p, averaged over the step's response tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megarl.algo.finite import BadNumber
from megarl.algo.loss import ActorLoss
from megarl.batch import Batch
from megarl.config import Config, to_yaml
from megarl.data.chat import load_tokenizer
from megarl.data.sft import SftExamples
from megarl.durable_files import write_text
from megarl.group import Group, RankError
from megarl.machines import NodeLost
from megarl.metrics.jsonl import Series, read_series
from megarl.metrics.report import write_summary
from megarl.metrics.stats import finalise
from megarl.metrics.timer import Timer
from megarl.metrics.trackers.console import warn
from megarl.metrics.trackers.status import end_noted
from megarl.processes.presence import watched
from megarl.processes.signals import Signals
from megarl.report.page import reported
from megarl.roles.handles import Actor, Packing, Update
from megarl.terminal import sentences
from megarl.trainer.bad_numbers import BadNumbers, spikes_of, watch
from megarl.trainer.build import (
    engine_settings,
    make_group,
    make_mini_model,
    model_folder,
    num_token_ids,
    optim_settings,
    start_trackers,
    stop_ids,
)
from megarl.trainer.checkpoint.checkpoint import Checkpoint, find, restore, save_before
from megarl.trainer.checkpoint.manifest import Damaged
from megarl.trainer.checkpoint.resume import announce, require_state
from megarl.trainer.checkpoint.retention import Retention
from megarl.trainer.checkpoint.save_times import SaveTimes, saved
from megarl.trainer.checkpoint.saver import Saver
from megarl.trainer.checks.machine import lacks_memory, memory_on_cpu
from megarl.trainer.infrastructure import Infrastructure
from megarl.trainer.observed.profile import check_profile, profiled
from megarl.trainer.owner import owned

VAL_LOSS = "val/loss"
AVERAGED = 5  # losses of steps, whose batches differ
LEARNT = 0.05  # a loss below it
METRICS = {"sft/loss": "actor/pg_loss", "sft/grad_norm": "actor/grad_norm", "sft/lr": "actor/lr"}


def sft(config: Config) -> dict[str, Any]:
    """Train for trainer.total_training_steps or sft.epochs, write `hf/` into the run's folder, return the summary.

    Resumes, and starts failed ranks again, as `megarl train` does.  Raises Terminated after SIGTERM.
    """
    folder = config.trainer.run_dir
    with owned(folder), end_noted(folder), reported(folder):
        return _sft(config)


def _sft(config: Config) -> dict[str, Any]:
    trainer = config.trainer
    with Signals(trainer.term_grace_s) as signals:
        make_mini_model(config)
        if sentence := lacks_memory(memory_on_cpu(config, "sft")):
            warn(sentence)
        examples = read_examples(config, "sft.train_files", config.sft.train_files)
        held_out = read_examples(config, "sft.val_files", config.sft.val_files) if config.sft.val_files else None
        steps = training_steps(config, examples)
        with watched(trainer.driver_silence_s), Infrastructure(config, serves=False) as infrastructure:
            summary = _trained(config, examples, held_out, steps, signals, infrastructure)
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


@dataclass
class Progress:
    """What one start of the ranks has come to."""

    resumed: Checkpoint | None  # where it began
    finished_steps: int = 0
    saver: Saver | None = None

    @property
    def last_save(self) -> Checkpoint | None:
        return (self.saver.last if self.saver else None) or self.resumed


def _trained(
    config: Config,
    examples: SftExamples,
    held_out: SftExamples | None,
    num_steps: int,
    signals: Signals,
    infrastructure: Infrastructure,
) -> dict[str, Any]:
    """The summary of the training, which begins at the newest save that is whole."""
    trainer, first_examples = config.trainer, examples.state_dict()
    resumed = find(trainer.resume_mode, trainer.run_dir / "checkpoints", warn, verify=trainer.verify_resume)
    while True:
        examples.load_state_dict(first_examples)
        progress = Progress(resumed)
        try:
            return _train(config, examples, held_out, num_steps, progress, signals, infrastructure)
        except (RankError, NodeLost) as error:
            if signals.ends:
                raise
            infrastructure.forgive(error, progress.finished_steps)
            resumed = progress.last_save
        except Damaged as error:
            assert resumed is not None, "a run that resumes from nothing finds nothing damaged"
            resumed = save_before(resumed, error, trainer, warn)


def _train(
    config: Config,
    examples: SftExamples,
    held_out: SftExamples | None,
    num_steps: int,
    progress: Progress,
    signals: Signals,
    infrastructure: Infrastructure,
) -> dict[str, Any]:
    """From the start, or from the save that is resumed, to the exported model; returns the summary."""
    folder, first_step, resumed = config.trainer.run_dir, 0, progress.resumed
    state: dict[str, Any] = {"loss": None, "wall_s": 0.0}
    folder.mkdir(parents=True, exist_ok=True)
    if resumed is not None:
        first_step, state = resumed.step, dict(_state_of(resumed))
        progress.finished_steps = first_step
        announce(resumed, config, num_steps)
        examples.load_state_dict(state["examples"])
    write_text(folder / "config.yaml", to_yaml(config))
    (folder / "summary.json").unlink(missing_ok=True)  # only a finished run has one
    trackers = start_trackers(config, num_steps, first_step if resumed else None)
    began = time.monotonic() - state["wall_s"]
    try:
        trackers.stage("starting ranks")
        with make_group(config, config.actor, "ranks_0", nodes=infrastructure.nodes) as group:
            actor = _actor(config, group, num_steps, resumed)
            check_profile(config.trainer.profile, num_steps, [group])
            saver = _saver(config, actor, resumed)
            progress.saver = saver
            times = SaveTimes(config.trainer, signals, first_step=first_step, num_steps=num_steps)
            bad_numbers = BadNumbers(config.trainer.on_nonfinite, folder)
            watch({"actor": actor}, bad_numbers, config, resumed)
            timer, signals.is_patient = Timer(on_stage=trackers.stage), True

            def evaluate(step: int) -> None:
                if held_out is not None:
                    trackers.stage("testing")
                    begun = time.monotonic()
                    state["val_loss"] = loss_of(actor, held_out, config.sft.batch_size)
                    trackers.log(step, {VAL_LOSS: state["val_loss"], "timing_s/testing": time.monotonic() - begun})
                    timer.start()

            if first_step == 0 and config.trainer.val_before_train:
                evaluate(0)
            for step in range(first_step, num_steps):
                bad_numbers.begin(step + 1)
                try:
                    with profiled(config.trainer.profile, [group], folder, step + 1, timer):
                        metrics = _step(step, actor, examples, config.sft.batch_size, timer)
                except BadNumber:
                    saver.settle()
                    raise
                progress.finished_steps = step + 1
                trackers.log(step + 1, metrics | bad_numbers.metrics)
                state["loss"] = metrics.get("sft/loss", state["loss"])
                state["spikes"] = spikes_of({"actor": actor})
                ends = signals.ends  # one that comes later waits for the next step
                if times.due(step + 1):
                    with timer("save_checkpoint"):
                        saver.start(step + 1)
                    saver.describe(state | {"examples": examples.state_dict(), "wall_s": time.monotonic() - began})
                saver.poll()
                if not ends and (step + 1 == num_steps or due(step + 1, config.trainer.test_freq)):
                    evaluate(step + 1)
                if ends:
                    saver.finish()
                    signals.end(saved(step + 1, saver.last or resumed))
            saver.finish()
            trackers.stage("writing the model")
            actor.export(folder / "hf")
    except BaseException as error:
        trackers.close(error)
        raise
    trackers.close()
    summary = {"steps": num_steps, "loss": state["loss"], "wall_s": round(time.monotonic() - began, 1)}
    return summary | ({"val_loss": state.get("val_loss")} if held_out is not None else {})


def _saver(config: Config, actor: Actor, resumed: Checkpoint | None) -> Saver:
    return Saver(
        config.trainer.run_dir / "checkpoints",
        {"actor": actor},
        Retention.of(config),
        in_background=config.trainer.async_save,
        limit_s=config.trainer.call_timeout_s,
        warn=warn,
        origin=resumed.origin if resumed else None,
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


def due(step: int, every: int) -> bool:
    """Whether something is done after this step, counted from 1; `every` below 1: never."""
    return every > 0 and step % every == 0


def _step(step: int, actor: Actor, examples: SftExamples, batch_size: int, timer: Timer) -> dict[str, float]:
    """One optimizer step; returns its metrics, without those of the loss if it was skipped."""
    with timer("update"):
        batch = supervised(examples.take(batch_size))
        _, stats = actor.update(batch, seed=step)
        numbers = finalise(stats)
    metrics = {ours: numbers[name] for ours, name in METRICS.items() if name in numbers}
    return metrics | timer.finish(num_tokens=batch.num_tokens)


def read_examples(config: Config, key: str, files: Sequence[str]) -> SftExamples:
    """The examples of these files, of which a line says what became of the rows."""
    sft = config.sft
    found = SftExamples(
        files,
        load_tokenizer(model_folder(config.model.tokenizer_path)),
        prompt_key=sft.prompt_key,
        response_key=sft.response_key,
        max_length=sft.max_length,
        seed=config.data.seed,
        overlong=sft.overlong_rows,
        answers=sft.answers,
        system_prompt=config.data.system_prompt,
        template=config.data.apply_chat_template_kwargs,
        stop_ids=stop_ids(model_folder(config.model.path)),
        num_ids=num_token_ids(config),
    )
    sentences().print(f"{key}=[{', '.join(files)}]: {found.said}")
    if found.strange_ends:
        warn(
            f"{key}: the chat template ends answers with {', '.join(found.strange_ends)}, at which servers of "
            f"model.path={config.model.path} do not stop; eos_token_id of its generation_config.json says where they do"
        )
    return found


def _actor(config: Config, group: Group, num_steps: int, resumed: Checkpoint | None) -> Actor:
    """The model on its ranks, which are started, with the weights and the optimizer of `resumed`."""
    limits = config.actor.ppo_max_token_len_per_gpu, config.actor.ppo_micro_batch_size_per_gpu
    packing = Packing(*limits, share_prefixes=config.trainer.share_prefixes)
    actor = Actor("actor", group, packing, update_settings=_update(config))
    group.start()
    actor.load(
        model_folder(config.model.path),
        dtype=config.model.dtype,
        optim=optim_settings(config.actor, num_steps),
        engine=engine_settings(config.actor),
        reads_weights=resumed is None,
    )
    if resumed is not None:
        restore(resumed, {"actor": actor}, verify=config.trainer.verify_resume)
    return actor


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


def _update(config: Config) -> Update:
    return Update(loss=ActorLoss("reinforce"), prompts_per_step=config.sft.batch_size)


def main(config: Config) -> int:
    """`megarl sft`."""
    sft(config)
    sentences().print(f"results: {config.trainer.run_dir.resolve()}")
    return 0
