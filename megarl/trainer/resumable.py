"""What `train` and `sft` share: a training that begins at a save, and whose ranks are started again when they fail."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megarl.algo.finite import BadNumber
from megarl.config import Config, to_yaml
from megarl.config.schema import Trainer
from megarl.group import RankError
from megarl.io.durable_files import patient, write_text
from megarl.io.terminal import sentences
from megarl.machines.nodes import NodeLost
from megarl.metrics.reading.status import end_noted
from megarl.metrics.report.folder import CODE
from megarl.metrics.report.page import reported
from megarl.metrics.trackers.console import note, warn
from megarl.metrics.trackers.trackers import Trackers, make_trackers
from megarl.processes.signals import Signals
from megarl.roles.handles import Trainable
from megarl.rollout.collector.collector_client import CollectorError
from megarl.servers.server_process import ServerDied
from megarl.trainer.bad_numbers import BadNumbers, watch
from megarl.trainer.checkpoint.checkpoint import Checkpoint, Damaged, Retention, save_before
from megarl.trainer.checkpoint.resume import keep_code, restore
from megarl.trainer.checkpoint.saver import Saver
from megarl.trainer.infrastructure import Infrastructure
from megarl.trainer.run_lock import owned, shared

_LEAVE_RANKS_WELL = (BadNumber, CollectorError, ServerDied)  # so that a save they write is finished first


@contextmanager
def own_folder(config: Config) -> Iterator[None]:
    """Own the run's folder, and leave in it how the run ended, and its report."""
    trainer = config.trainer
    with (
        owned(trainer.run_dir, trusts_others=trainer.trust_shared_folders),
        shared(trainer),
        reported(trainer.run_dir),  # which has how it ended
        end_noted(trainer.run_dir),
    ):
        yield


def report_results(config: Config) -> int:
    """Print where the results of a command are; returns its exit code."""
    sentences().print(f"results: {config.trainer.run_dir.resolve()}")
    return 0


@dataclass(frozen=True)
class Plan:
    """What is known of a training before any process starts; each attempt has one with another save."""

    config: Config
    num_steps: int
    resume: Checkpoint | None  # the save at which the next attempt begins; None: at the beginning

    @property
    def first_step(self) -> int:
        """Steps that are finished where the attempt begins."""
        return self.resume.step if self.resume else 0

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.config.trainer.run_dir


class SaveTimes:
    """When a run saves: by steps, by time, at its end, and when a signal asks.

    Example: if times.due(step): saver.start(step), then saver.describe(state).
    """

    def __init__(
        self,
        settings: Trainer,
        signals: Signals,
        *,
        first_step: int,
        num_steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`first_step`: the state after so many steps is saved or needs no save.  `clock`: in seconds."""
        self.last = first_step  # of the last save
        self._settings = settings
        self._signals = signals
        self._num_steps = num_steps
        self._clock = clock
        self._asked = 0  # the step whose save SIGUSR1 has asked for, until that is reported
        self._since = clock()

    def due(self, step: int) -> bool:
        """Whether the state after `step` steps is to be saved; if so, it counts as saved."""
        every_s = self._settings.save_every_s
        by_time = every_s is not None and self._clock() - self._since >= every_s
        at_end = step == self._num_steps and self._settings.saves
        asked = self._signals.take_save()
        if not (due(step, self._settings.save_freq) or by_time or at_end or asked or self._signals.ends):
            return False
        self.last, self._since = step, self._clock()
        self._asked = step if asked else self._asked
        return True

    def answer(self, last: Checkpoint | None) -> None:
        """Report to the sender of SIGUSR1 that its save is there; `last`: the newest one."""
        if self._asked and last is not None and last.step >= self._asked:
            note(f"SIGUSR1: step {last.step} is saved")
            self._asked = 0


@dataclass(kw_only=True)
class Attempt:
    """A start of the ranks, whose parts run: what attempts of `train` and of `sft` have in common."""

    plan: Plan
    infrastructure: Infrastructure
    signals: Signals
    bad_numbers: BadNumbers
    saver: Saver
    times: SaveTimes
    finished_steps: int

    @property
    def last_save(self) -> Checkpoint | None:
        """The newest checkpoint that this attempt has finished, or from which it began."""
        return self.saver.last or self.plan.resume

    def between_steps(self, step: int, save: Callable[[], None]) -> None:
        """After `step` steps: make a save that is owed, answer SIGUSR1, and let machines go that are to leave.

        `save` starts and describes a save of the state now.  Raises NodeLeft if machines leave, once the step is saved.
        """
        if self.signals.ends:
            return
        self.saver.insist(save)
        self.times.answer(self.saver.last)
        nodes = self.infrastructure.nodes
        if step > 0 and nodes is not None and nodes.leaving and self.times.last == step:
            self.saver.finish()
            nodes.let_go(f"step {self.last_save.step}" if self.last_save else "nothing")

    def finish_saves(self) -> None:
        """Wait for the last save."""
        self.times.answer(self.saver.last)  # an earlier one may be what SIGUSR1 asked for
        self.saver.finish()
        self.times.answer(self.saver.last)

    def end(self, step: int) -> NoReturn:
        """End the run, as SIGTERM asks, after `step` steps, of which the state is saved or is being saved."""
        self.finish_saves()
        self.signals.end(saved(step, self.last_save))


def saved(step: int, last: Checkpoint | None) -> str:
    """What a run reports that ends after `step`; `last`: its newest save, which is older if the last one has failed."""
    if last is None:
        return f"step {step} is finished, and nothing is saved"
    return f"step {step} is finished, step {last.step} is saved; the same command goes on from there"


def open_trackers(plan: Plan, stack: ExitStack) -> Trackers:
    """Write the settings and the user's code, and open what logs the training, closed with the error that ends it."""
    config, trainer = plan.config, plan.config.trainer
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_text(plan.folder / "config.yaml", to_yaml(config))
    if plan.resume is None or not (plan.folder / CODE).exists():
        keep_code(config, plan.folder / CODE)
    trackers = make_trackers(
        trainer.logger, plan.folder, trainer.project_name, trainer.experiment_name, asdict(config), plan.num_steps,
        resume_step=plan.resume.step if plan.resume else None,
    )  # fmt: skip
    stack.push(lambda _, error, __: trackers.close(error))
    return trackers


def take_up(plan: Plan, roles: Mapping[str, Trainable], bad_numbers: BadNumbers, stack: ExitStack) -> Saver:
    """Restore loaded roles from the save; from now on they report bad numbers, and the saver that is returned saves."""
    trainer, resume = plan.config.trainer, plan.resume
    if resume is not None:
        restore(resume, roles, verify=trainer.verify_resume)
    watch(roles, bad_numbers, plan.config, resume)
    saver = Saver(
        plan.folder / "checkpoints",
        roles,
        Retention.of(plan.config),
        in_background=trainer.async_save,
        allowed=trainer.failed_saves,
        limit_s=trainer.call_timeout_s,
        warn=warn,
        origin=resume.origin if resume else None,
    )
    stack.enter_context(patient(trainer.call_timeout_s, warn, saver.give_way))
    stack.push(lambda _, error, __: saver.settle() if isinstance(error, _LEAVE_RANKS_WELL) else None)
    return saver


P = TypeVar("P", bound=Plan)
A = TypeVar("A", bound=Attempt)


def to_the_end(
    plan: P,
    open_attempt: Callable[[P], AbstractContextManager[A]],
    loop: Callable[[A], dict[str, Any]],
    signals: Signals,
    infrastructure: Infrastructure,
) -> dict[str, Any]:
    """Run attempts until one of them ends; returns what `loop` returns of it.

    If ranks fail, and `infrastructure` allows another start, the next one begins at the last save; if a save is
    damaged, at the one before it.  A bad number can make the training go back.
    """
    trainer = plan.config.trainer
    while True:
        attempt: A | None = None
        try:
            with open_attempt(plan) as attempt:
                return loop(attempt)
        except (RankError, NodeLost) as error:
            if signals.ends:
                raise
            infrastructure.allow_restart(error, attempt.finished_steps if attempt else plan.first_step)
            save = attempt.last_save if attempt else plan.resume
        except Damaged as error:
            assert plan.resume is not None, "a run that resumes from nothing finds nothing damaged"
            save = save_before(plan.resume, error, trainer, warn)
        except BadNumber as found:
            if signals.ends or attempt is None:
                raise
            save = attempt.last_save
            attempt.bad_numbers.roll_back(found, save)
        plan = replace(plan, resume=save)
        del attempt
        gc.collect()  # an attempt and its error hold each other; its samples go before there are others


def due(step: int, every: int) -> bool:
    """Whether something is done after this step, counted from 1; `every` below 1: never."""
    return every > 0 and step % every == 0
