"""The parts of the training loop in `train.py`, and the other stages of a run.

`run` starts and ends the parts of a run; `build` makes them from the configuration. `roles` are the models,
`infrastructure` outlives a restart of the ranks, `algorithm` is the algorithm as plain values. `checks/` come before a
run, `observed/` records times and metrics, `servers/` are the servers as the trainer sees them, `teachers` says what
the policy learns from whom. `checkpoint/` saves and resumes, `artifacts` writes the results. `sft` and `evaluation/`
are also stages of their own; `recipes/` prepares the quickstart's.
"""
