"""The HF server, a small rollout server: transformers' modelling code behind SGLang's routes, on a CPU.

`main`: the program. `routes`: the HTTP routes. `calls`: the JSON of /generate. `scheduler`: continuous batching over
`running_batch`. `model`: the forward pass with `kv_cache`. `sampling`: batch-invariant sampling. `weights`: receives
pushes, also through `shared_memory`. `names`: the tensors that a push may contain.
It uses the protocol of `rollout/` and nothing of the trainer. Only its own program imports it.
"""
