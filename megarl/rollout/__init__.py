"""Rollout: requests completions from servers and turns prompts into scored samples.

`protocol`: SGLang's routes and JSON. `client`, `pool/`: calls to one server, to many. `server_states`: which servers
may generate. `settings`: what is the same for all requests. `collect`: one prompt becomes a scored group, in a separate
process (`collector/`). `prefetch`: iterations requested ahead of training. `hf_server/` serves the same routes with
transformers; `servers/` starts the processes.
Nothing here depends on Megatron, losses, rewards (a scoring object is passed in), or the source of the weights.
"""
