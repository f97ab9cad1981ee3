"""Following a run: statistics of a batch, where the seconds go, where the numbers go, what is left at the end.

Knows: names of metrics, files of a run's folder, terminals, wandb, TensorBoard.
Knows not: how a loss is made, processes, the configuration.
Called by: the driver, once a step; the stories (train, sft, evaluate) at their end.

    TRACKERS   trainer.logger   console  jsonl  tensorboard  wandb

plots.py draws with matplotlib, which is imported when it draws; wandb and TensorBoard when they are asked for.
"""

from megarl.metrics.jsonl import drop_after
from megarl.metrics.plots import learning_curve
from megarl.metrics.report import Answer, samples_table, write_samples, write_summary
from megarl.metrics.stats import batch_stats, finalise
from megarl.metrics.timer import Timer
from megarl.metrics.trackers import TRACKERS, Trackers, make_trackers

__all__ = [
    "TRACKERS",
    "Answer",
    "Timer",
    "Trackers",
    "batch_stats",
    "drop_after",
    "finalise",
    "learning_curve",
    "make_trackers",
    "samples_table",
    "write_samples",
    "write_summary",
]
