"""The HF server, a small rollout server: transformers' modelling code behind SGLang's routes, on a CPU or one GPU.

`main`: the program. `device`: what differs between CPU and GPU. `routes`: the HTTP routes. `calls`: the JSON of
/generate. `scheduler`: continuous batching over `running_batch`. `prefill`: what a prefill computes. `prefix_cache`: KV
for requests that begin alike. `model`: the forward pass with `kv_cache`. `sampling`: batch-invariant sampling.
`weights`: receives pushes, also through `shared_memory`. `names`: the tensors that a push may contain.
It uses the protocol of `rollout/` and the digests of `weights/`, and nothing of the trainer. Only its own program
imports it.
"""
