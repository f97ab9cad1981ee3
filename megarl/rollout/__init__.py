"""How completions are asked for, and how prompts become scored samples.

Knows: SGLang's routes and JSON (`protocol`), how to call one server or many (`client`, `pool`), how one prompt
becomes a scored group (`collect`) in a process of its own (`collector`, asked by `collector_client`), and the
iterations that are asked for ahead (`prefetch`); work goes to trusted servers only (`trust`). `hf_server/` answers
the same routes on a CPU, `servers/` starts the processes.
Does not know: Megatron, losses, what a reward is (a scoring object is passed in), or where weights come from.
"""
