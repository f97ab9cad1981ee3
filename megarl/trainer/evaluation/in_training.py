"""Evaluations of a training: made between two steps, or beside the next one, and written down.

Between the rollout of a step and its push the servers hold the weights of the step before, and with rollout.ahead=0
they have nothing to do.  An evaluation of these weights beside the step begins when the rollout is taken, and ends
before the step is saved and pushed: so no reply sees two versions, and no save is newer than an evaluation that is
still to be made.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from megarl.io.durable_files import kept_text
from megarl.metrics.reading.jsonl import append_lines
from megarl.metrics.trackers.console import warn
from megarl.processes.signals import Signals
from megarl.rollout.collector.collector_client import CollectorError
from megarl.trainer.checkpoint.saver import Saver
from megarl.trainer.evaluation.evaluate import EVALUATIONS, Evaluation, EvaluationLost, Evaluator
from megarl.trainer.servers.server_manager import ServerManager
from megarl.trainer.telemetry.run_log import RunLog

BEFORE = "answers_before.json"
UNSCORED = (CollectorError, EvaluationLost)  # an evaluation without scores, for example with reward.on_error=stop


@dataclass
class Evaluations:
    """Example: evaluations.measure(7, signals); or .plan(7), in the step after begin(), the gradient, finish()."""

    evaluator: Evaluator
    servers: ServerManager
    log: RunLog
    saver: Saver
    has_begun: bool = False  # whether one goes on beside a step
    _planned: int | None = None

    def measure(self, step: int, signals: Signals) -> Evaluation:
        """Evaluate the weights after `step` steps, while servers and saves are looked after.

        An empty evaluation after SIGTERM, and if no reward could score anything, after the first step at least.
        """
        found = Evaluation([])
        if self.evaluator.prompts:
            began = time.monotonic()
            self.log.trackers.stage("testing")
            self.evaluator.submit(version=self.servers.version)
            while not self.evaluator.ready():
                if signals.ends:
                    return found
                self.servers.check_servers()
                self._look()
            found = self._record(step, {"timing_s/testing": time.monotonic() - began})
        self.log.timer.start()
        return found

    def plan(self, step: int) -> None:
        """The weights after `step` steps, which the servers hold now, are to be evaluated beside the next step."""
        self._planned = step

    def begin(self) -> None:
        """Send the prompts of the planned evaluation, if there is one, to the servers."""
        if self._planned is not None:
            self.evaluator.submit(version=self.servers.version)
            self.has_begun = True

    def finish(self) -> None:
        """Wait for the evaluation that has begun, if there is one.

        The trainer holds newer weights by now, so a server that died cannot get back those that are evaluated: if none
        has them any more, the evaluation is given up.
        """
        if not self.has_begun:
            return
        step = self._planned
        self._planned = None
        self.has_begun = False
        assert step is not None, "what has begun was planned"
        with self.log.timer("testing"):
            while not self.evaluator.ready():
                if not self.servers.watch():
                    self.evaluator.cancel()
                    return warn(f"the evaluation after step {step} is given up: no server holds its weights any more")
                self._look()
            self._record(step, {})

    def _look(self) -> None:
        self.saver.poll()
        self.log.trackers.stage("testing", *self.evaluator.progress)

    def _record(self, step: int, times: dict[str, float]) -> Evaluation:
        """Write down the evaluation, and return it; `times`: metrics."""
        try:
            found = self.evaluator.take()
        except EvaluationLost as error:
            if step == 0 or not error.by_rewards:
                raise
            warn(str(error))  # what was trained until now is worth more than this score
            return Evaluation([])
        audit = self.log.audit.look(found.audited())
        append_lines(self.log.folder / EVALUATIONS, [found.line(step)])
        self.log.trackers.log(step, found.metrics() | audit | times)
        self.saver.note_score(step, found.mean.value)
        if step == 0:
            remember(self.log.folder, found)
        return found


def remember(folder: Path, before: Evaluation) -> None:
    """Save the answers of the untrained model for the comparison at the end, which may run in another process."""
    accuracy = before.accuracy
    content = {"score": before.mean.value, "is_share": before.is_share, "answers": before.answers()}
    content["accuracy"] = None if accuracy is None else accuracy.value
    kept_text(folder / BEFORE, json.dumps(content))
