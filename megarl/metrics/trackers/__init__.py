"""Where the metrics of a run go: a tracker for each name in `trainer.logger`, and those that every run has.

`tracker`: the base class, and the decorator that gives a class its name. `trackers`: several as one, and the short
ones. `console`, `mlflow_tracker`, `prometheus`, `status`: each a tracker of its own. A new one is a class in a file
here, with `@register_tracker`.
"""
