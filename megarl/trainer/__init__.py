"""What the loop of `train.py` is made of, and the other stages of a run.

`run` starts and ends the parts of a run, which `build` makes from the configuration; `roles` are its models, and
`run_log` has its seconds and numbers; `infrastructure` outlives a restart of the ranks; `algorithm` is the algorithm
as plain values; `server_manager` knows which servers may generate, `colocation` shares GPUs with them; `checkpoint`
saves and resumes, `artifacts` is what a run leaves behind; `sft` and `evaluate` are stages of their own, and
`quickstart` makes what its recipe needs.
"""
