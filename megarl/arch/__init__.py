"""What is known of a model and its parallel layout before any process starts: config.json, layouts, Megatron's fields.

`layout`: TP, PP, CP, EP, DP and the groups of ranks. `hf_config` reads config.json, `settings/` computes Megatron's
settings of it, `count` its parameters and FLOPs; `gpus` has the data sheets.  Neither torch nor Megatron is imported.
"""
