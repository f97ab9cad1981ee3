"""Advice about the settings of a run, by its metrics.

`advice`: says it in the run. `rules`: known problems, by name. `signals`: patterns in metrics that show them.
"""
