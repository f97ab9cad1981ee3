"""Rollout servers as processes: command lines, start, health checks, restart, and the process group with the trainer.

`launch`: how a server is started, with hf_server/ or with SGLang in its own environment (`sglang`,
`sglang_environment`). `server_process`, `supervisor`: start on this or another machine, health checks and restarts.
`external`: servers that run already. `router`: SGLang's router. `weight_group`: the process group of a push.
`sglang_server`, `router_server` and `sglang_cpu/` run in SGLang's environment.
Nothing here depends on Megatron, losses, prompts, or the source of the weights.
"""
