"""What a run does about numbers with which it must not train: it stops, skips the step, or goes back to a save.

A bad number (algo/finite.py) comes from the ranks, for an optimizer step that none of them made; or from the driver,
for a batch before its first step; or from a push, for weights.  Each one is reported on the console in one line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.algo.finite import BadNumber
from megarl.algo.spikes import Spike, Spikes
from megarl.config import Config
from megarl.config.names import ROLLBACK, SKIP
from megarl.metrics.reading.jsonl import ROLLBACKS, append_lines, read_lines
from megarl.metrics.trackers.console import warn
from megarl.roles.handles import Trainable
from megarl.trainer.checkpoint.checkpoint import Checkpoint

MAX_ROLLBACKS = 3  # to the same save; then the run stops


class BadNumbers:
    """Example:

    bad_numbers = BadNumbers("skip", folder)
    bad_numbers.begin(12, names, visits)          # a step; names of its samples, visits of its prompt groups
    bad_numbers.judge(found)                      # reports it and returns, or raises it
    bad_numbers.skipped == [47]; bad_numbers.metrics["trainer/skipped_steps"] == 1.0
    """

    def __init__(self, on_nonfinite: str, folder: Path, *, epochs: int = 1, warn: Callable[[str], None] = warn) -> None:
        """`folder`: of the run.  `epochs`: of the actor over a batch."""
        self._on_nonfinite = on_nonfinite
        self._epochs = epochs
        self._warn = warn
        self._file = folder / ROLLBACKS
        self._num_rollbacks = len(list(_rows(self._file)))
        self._step = 0
        self._names: Sequence[str] = ()
        self._visits: Sequence[int] = ()
        self._counts: Counter[str] = Counter()
        self._refused: Counter[int] = Counter()  # how often a prompt group was in a step of the actor that was skipped

    def begin(self, step: int, names: Sequence[str] = (), visits: Sequence[int] = ()) -> None:
        """A step, counted from 1, has its batch: the names of its samples, and the visit of each prompt group."""
        self._step = step
        self._names = names
        self._visits = visits
        self._counts.clear()
        self._refused.clear()

    def judge(self, found: BadNumber) -> None:
        """Raises the number with its sample's name, unless the configuration skips it."""
        if self._names:
            found.name_sample(self._names)
        self._counts["spikes"] += isinstance(found, Spike)
        if self._on_nonfinite != SKIP:
            raise found
        self._counts["skipped"] += 1
        if not found.role:
            self._refused.update(dict.fromkeys(range(len(self._visits)), self._epochs))
        elif found.role == "actor":
            self._refused.update(found.groups)
        what = f"this optimizer step of {found.role}" if found.role else "training on this batch"
        self._warn(f"step {self._step}: {found}; {what} is skipped")

    @contextmanager
    def judged(self) -> Iterator[None]:
        """A bad number that ends the block is judged."""
        try:
            yield
        except BadNumber as found:
            self.judge(found)

    @property
    def skipped(self) -> list[int]:
        """The visits of the batch with which the actor made no step, as each of theirs was skipped."""
        return [self._visits[group] for group, times in sorted(self._refused.items()) if times >= self._epochs]

    @property
    def metrics(self) -> dict[str, float]:
        """Skipped steps and spikes of this step, and all rollbacks since the run began."""
        counts = {"skipped_steps": self._counts["skipped"], "spikes": self._counts["spikes"]}
        return {f"trainer/{name}": float(n) for name, n in (counts | {"rollbacks": self._num_rollbacks}).items()}

    def roll_back(self, found: BadNumber, save: Checkpoint | None) -> None:
        """Write down that the run goes back to `save` (None: to its start), without this step's batch.

        Raises the number if the configuration does not roll back, if no batch had it, or if the run went back to the
        same save MAX_ROLLBACKS times.
        """
        if self._on_nonfinite != ROLLBACK or not self._visits:
            raise found
        step = save.step if save else 0
        if sum(row["step"] == step for row in _rows(self._file)) >= MAX_ROLLBACKS:
            times = f"the run has gone back to step {step} {MAX_ROLLBACKS} times, and no later save was reached"
            raise BadNumber(f"{found}; {times}: lower the learning rate, or look at the data") from found
        visits = list(self._visits)
        append_lines(self._file, [{"step": step, "bad_step": self._step, "what": str(found), "skipped": visits}])
        how = f"the run goes back to step {step}, without the {len(visits)} prompts of this batch"
        self._warn(f"step {self._step}: {found}; {how}")


def watch(
    roles: Mapping[str, Trainable], bad_numbers: BadNumbers, config: Config, save: Checkpoint | None = None
) -> None:
    """Let the roles report bad numbers, and spikes if they are limited; `save`: where the run resumes."""
    for name, role in roles.items():
        role.on_bad = bad_numbers.judge
        if config.trainer.spike_sigma is not None:
            role.spikes = Spikes(config.trainer.spike_sigma, getattr(config, name).max_grad_norm)
            before = save.state["spikes"] if save else {}
            if name in before:  # a run may be watched from a resume on
                role.spikes.load_state_dict(before[name])


def spikes_of(roles: Mapping[str, Trainable]) -> dict[str, Any]:
    """What `watch` needs of a checkpoint."""
    return {name: role.spikes.state_dict() for name, role in roles.items() if role.spikes is not None}


def left_out(folder: Path) -> list[int]:
    """The visits that a run's rollbacks left out."""
    return [visit for row in _rows(folder / ROLLBACKS) for visit in row["skipped"]]


def _rows(file: Path) -> Iterable[dict[str, Any]]:
    return read_lines(file) if file.exists() else ()
