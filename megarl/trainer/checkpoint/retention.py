"""Which saves of a run are kept: the newest, milestones, and the best by validation score."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.config import Config
from megarl.durable_files import write_text

SCORES = "scores.json"  # of the evaluations after the steps that were saved


@dataclass(frozen=True)
class Retention:
    newest: int  # as many of the last steps
    every: int = -1  # each multiple of so many steps is a milestone; -1: none
    best: int = 0  # as many of the highest scores; of two equal ones the later
    first: int | None = None  # the step of the save that trainer.resume_mode names, while the command may come again

    @classmethod
    def of(cls, config: Config) -> Retention:
        trainer, named = config.trainer, Path(config.trainer.resume_mode)
        step, own = named.name.removeprefix("step_"), (trainer.run_dir / "checkpoints").resolve()
        first = int(step) if step.isdecimal() and named.parent.resolve() == own else None
        return cls(trainer.max_checkpoints_to_keep, trainer.keep_every_steps, trainer.keep_best, first)

    def reasons(self, steps: Collection[int], scores: Mapping[int, float]) -> dict[int, list[str]]:
        """step -> why it is kept: newest, milestone, best, first; none: it may be deleted.

        Example: Retention(1, every=20, best=1).reasons([10, 20, 30], {10: 0.9, 20: 0.8})
        -> {10: ["best"], 20: ["milestone"], 30: ["newest"]}
        """
        scored = sorted((step for step in steps if step in scores), key=lambda step: (scores[step], step))
        chosen: dict[str, Sequence[int | None]] = {
            "newest": sorted(steps)[-self.newest :],
            "milestone": [step for step in steps if self.every > 0 and step % self.every == 0],
            "best": scored[-self.best :] if self.best else [],
            "first": [self.first],
        }
        return {step: [reason for reason, kept in chosen.items() if step in kept] for step in sorted(steps)}


def read_scores(root: Path) -> dict[int, float]:
    """step -> validation score.  Raises ValueError for a file that is damaged."""
    file = root / SCORES
    if not file.exists():
        return {}
    try:
        return {int(step): float(score) for step, score in json.loads(file.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: it cannot be read ({error}); expected an unchanged file, or none") from error


def write_scores(root: Path, scores: Mapping[int, float]) -> None:
    write_text(root / SCORES, json.dumps({str(step): scores[step] for step in sorted(scores)}))
