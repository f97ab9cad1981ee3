"""The parts of the training loop in `train.py`, and the other stages of a run.

`preflight` checks and reads what a run needs, `run` starts its parts, `resumable` starts them again after a failure,
`build` makes parts from the configuration. `roles` are the models, `infrastructure` outlives a restart of the ranks,
`algorithm` is the algorithm as plain values. `telemetry/` records times and metrics, `servers/` are the servers as the
trainer sees them, `teachers` says what the policy learns from whom. `checkpoint/` saves and resumes, `artifacts` writes
the results. `sft` is supervised training, `evaluation/` also a command; `checks/` has all checks of rewards;
`recipes/` prepares the quickstart.
"""
