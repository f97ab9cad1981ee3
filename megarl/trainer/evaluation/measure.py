"""An evaluation in the training loop: made while servers and saves are looked after, and written down."""

from __future__ import annotations

import time

from megarl.metrics.jsonl import append_lines
from megarl.metrics.trackers.console import warn
from megarl.processes.signals import Signals
from megarl.trainer.checkpoint.saver import Saver
from megarl.trainer.evaluation.evaluate import EVALUATIONS, Evaluation, EvaluationLost, Evaluator
from megarl.trainer.observed.run_log import RunLog
from megarl.trainer.servers.server_manager import ServerManager


def measure(
    step: int, evaluator: Evaluator, servers: ServerManager, log: RunLog, saver: Saver, signals: Signals
) -> Evaluation:
    """Evaluate the held-out prompts and log the score.

    An empty evaluation after SIGTERM, and if no reward could score anything, after the first step at least.
    """
    if not evaluator.prompts:
        found = Evaluation([])
    else:
        began = time.monotonic()
        log.trackers.stage("testing")
        evaluator.submit(version=servers.version)
        while not evaluator.ready():
            if signals.ends:
                return Evaluation([])
            servers.check_servers()
            saver.poll()
            log.trackers.stage("testing", *evaluator.progress)
        try:
            found = evaluator.take()
        except EvaluationLost as error:
            if step == 0 or not error.by_rewards:
                raise
            warn(str(error))  # what was trained until now is worth more than this score
            log.timer.start()
            return Evaluation([])
        note(step, found, log, saver, testing=time.monotonic() - began)
    log.timer.start()
    return found


def note(step: int, found: Evaluation, log: RunLog, saver: Saver, **times: float) -> None:
    """Write down the evaluation of the weights after `step` steps; `times`: in seconds, of stages outside a step."""
    audit = log.audit.look(found.audited())
    append_lines(log.folder / EVALUATIONS, [found.line(step)])
    log.trackers.log(step, found.metrics() | audit | {f"timing_s/{name}": s for name, s in times.items()})
    saver.note_score(step, found.mean.value)
