"""Rollout servers as processes: their command lines, their start, watch and restart, and their meeting with the
trainer.

Knows: what a server is started with (`launch`), the two programs (`engines`: SGLang in an environment of its own,
`sglang` and `sglang_environment`, and hf_server/), how one is started here or on another machine and looked after
(`server_process`, `supervisor`), servers that run already (`external`), SGLang's router (`router`), and
the process group of a push (`weight_group`). `sglang_server`, `router_server` and `sglang_cpu/` run in SGLang's
environment.
Does not know: Megatron, losses, prompts, or where weights come from.
"""
