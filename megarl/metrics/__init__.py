"""Metrics of a run: statistics of a batch, stage times, trackers, advice, and the reports at the end.

Contains the names of metrics, the files of a run's folder, console output, wandb, MLflow, TensorBoard and Prometheus.
Does not use losses, processes or the configuration.  Called by the driver in each step, and by train, sft and evaluate
at their end.

`trackers/` are where metrics go, `advice/` reads them for the user, `evaluation/` is what held-out prompts say.

    TRACKERS   trainer.logger   console  jsonl  mlflow  prometheus  tensorboard  wandb

matplotlib, wandb, MLflow and TensorBoard are imported only when they are used.
"""

from megarl.metrics.jsonl import drop_after
from megarl.metrics.plots import learning_curve
from megarl.metrics.report import Answer, samples_table, write_samples, write_summary
from megarl.metrics.stats import batch_stats, finalise
from megarl.metrics.timer import Timer
from megarl.metrics.trackers.trackers import TRACKERS, Trackers, make_trackers

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
