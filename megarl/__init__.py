"""megarl: reinforcement-learning post-training of language models with Megatron-Core and SGLang.

docs/architecture.md draws the floors of the rooms; docs/files.md has a line for each file.
Nothing is imported here, so that `import megarl.algo` costs torch and nothing more.
"""

__version__ = "0.1.0"
