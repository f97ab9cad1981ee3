"""Where the metrics of a run go: a tracker for each name in `trainer.logger`, and those that every run has.

`trackers`: the table of them, and how several are one. `console`, `mlflow_tracker`, `prometheus`: each a tracker of its
own. `status`: what the run is doing now, which every run has. `run`: what a tracker is told of the run.
"""
