"""Rollout: requests completions from servers and turns prompts into scored samples.

`protocol`: SGLang's routes and JSON. `client`, `pool/`: calls to one server, to many. `collect`: one prompt becomes a
scored group, in a separate process (`collector/`). `prefetch`: iterations requested ahead of training. `trust`: only
trusted servers get requests. `hf_server/` serves the same routes with transformers; `servers/` starts the processes.
Nothing here depends on Megatron, losses, rewards (a scoring object is passed in), or the source of the weights.
"""
