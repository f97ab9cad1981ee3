"""megarl: reinforcement-learning post-training of language models with Megatron-Core and SGLang.

The floors, from the bottom; an import only points down:

    0  sample (the nouns), layout, secret
    1  config (every knob), algo, data, rewards, metrics
    2  rollout (everything that speaks to an engine), mcore (everything that knows Megatron-Core)
    3  weights (Megatron shards <-> Hugging Face names <-> servers)
    4  group, roles, checkpoint, plan
    5  site, run, train, sft, evaluate, serve, node, quickstart, doctor, cli (the stories and their commands)

Nothing is imported here, so that `import megarl.algo` costs torch and nothing more.
"""

__version__ = "0.1.0"
