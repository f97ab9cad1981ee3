"""Metrics of a run: statistics of a batch, stage times, trackers, advice, and the reports at the end.

Contains the names of metrics, the files of a run's folder, console output, wandb, MLflow, TensorBoard and Prometheus.
Does not use losses, processes or the configuration.  Called by the driver in each step, and by train, sft and evaluate
at their end.

`trackers/` are where metrics go, `advice/` reads them for the user, `evaluation/` is what held-out prompts say.

    TRACKERS   trainer.logger   console  jsonl  mlflow  prometheus  tensorboard  wandb

wandb, MLflow and TensorBoard are imported only when they are used.
"""
