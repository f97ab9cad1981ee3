"""A small server of our own: transformers' modelling code behind SGLang's routes, on a CPU.

`main` is the program, `routes` has the routes, `calls` what a request says, `scheduler` the continuous batching over
`running_batch`, `model` the forward pass with `kv_cache`, `sampling` the draws that depend on nothing but their row;
`weights` takes pushes, from `shared_memory` too, and `names` are the tensors that a push may bring.
It knows the protocol of `rollout/`; it does not know the trainer, and nothing of ours imports it but its own program.
"""
