"""How the HF server generates: `scheduler` batches requests continuously, all other files are what it uses.

`running_batch`: requests and the decoded batch. `prefill`: what a prefill computes. `prefix_cache`: KV for requests
that begin alike. `model`: the forward pass with `kv_cache`. `sampling`: batch-invariant sampling. `chosen_experts`:
the experts of each token.
"""
