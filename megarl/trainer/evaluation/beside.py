"""An evaluation that goes on while the trainer works on the next step, with the weights that the servers hold.

Between the rollout of a step and its push the servers hold the weights of the step before, and with rollout.ahead=0
they have nothing to do.  An evaluation of these weights begins when the rollout is taken, and ends before the step is
saved and pushed: so no reply sees two versions, and no save is newer than an evaluation that is still to be made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megarl.metrics.trackers.trackers import Trackers
from megarl.trainer.evaluation.evaluate import Evaluation, EvaluationLost, Evaluator
from megarl.trainer.servers.server_manager import ServerManager


@dataclass
class Beside:
    """Example: beside.plan(7); in the step after, beside.begin(), the gradient, and then beside.finish(look)."""

    evaluator: Evaluator
    servers: ServerManager
    done: Callable[[int, Evaluation], None]  # gets the step and its evaluation
    give_up: Callable[[str], None]  # gets a sentence
    has_begun: bool = False  # whether one goes on
    _step: int | None = field(default=None)

    def plan(self, step: int) -> None:
        """The weights after `step` steps, which the servers hold now, are to be evaluated."""
        self._step = step

    def begin(self) -> None:
        """Send the prompts of the planned evaluation, if there is one, to the servers."""
        if self._step is not None:
            self.evaluator.submit(version=self.servers.version)
            self.has_begun = True

    def finish(self, look: Callable[[], object], trackers: Trackers) -> None:
        """Wait for the evaluation that has begun; `look` is called about every second, `trackers` show its progress.

        The trainer holds newer weights by now, so a server that died cannot get back those that are evaluated: if none
        has them any more, the evaluation is given up.
        """
        if not self.has_begun:
            return
        step, self._step, self.has_begun = self._step, None, False
        assert step is not None, "what has begun was planned"
        while not self.evaluator.ready():
            if not self.servers.watch():
                self.evaluator.cancel()
                self.give_up(f"the evaluation after step {step} is given up: no server holds its weights any more")
                return
            look()
            trackers.stage("testing", *self.evaluator.progress)
        try:
            found = self.evaluator.take()
        except EvaluationLost as error:
            if step == 0 or not error.by_rewards:
                raise
            return self.give_up(str(error))
        self.done(step, found)
