"""The parts of the training loop in `train.py`, and the other stages of a run.

`run` starts and ends the parts of a run; `build` makes them from the configuration. `roles` are the models, `run_log`
records times and metrics, `infrastructure` outlives a restart of the ranks, `algorithm` is the algorithm as plain
values. `servers/` are the servers as the trainer sees them, `teachers` says what the policy learns from whom.
`checkpoint/` saves and resumes, `artifacts` writes the results. `sft` and `evaluate` are separate stages; `recipes/`
prepares the quickstart's.
"""
