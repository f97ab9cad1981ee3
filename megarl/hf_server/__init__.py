"""The HF server, a small rollout server: transformers' modelling code behind SGLang's routes, on a CPU or one GPU.

`main`: the program. `device`: what differs between CPU and GPU. `routes`: the HTTP routes. `calls`: the JSON of
/generate. `generation/`: continuous batching and the model. `weights`: receives pushes, also through `shared_memory`.
`names`: the tensors that a push may contain. `scoring`: a reward model instead of a policy.
It uses the protocol of `rollout/` and the digests of `weights/`, and nothing of the trainer. Only its own program
imports it.
"""
