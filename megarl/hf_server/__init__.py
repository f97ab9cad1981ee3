"""The HF server, a small rollout server: transformers' modelling code behind SGLang's routes, on a CPU or one GPU.

`main`: the program. `routes`: the HTTP routes. `calls`: the JSON of /generate. `scheduler` batches requests
continuously, with `running_batch`: requests and the decoded batch; `prefix_cache`: KV for requests that begin alike;
`model`: the forward pass, with `kv_cache`; `sampling`: batch-invariant sampling. `weights`: receives pushes, also
through `shared_memory`. `device`: what differs between CPU and GPU. `scoring`: a reward model instead of a policy.
It uses the protocol of `rollout/` and the digests of `weights/`, and nothing of the trainer. Only its own program
imports it.
"""
