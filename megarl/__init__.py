"""megarl: reinforcement-learning post-training of language models with Megatron-Core and SGLang.

docs/architecture.md shows the packages and their floors; docs/files.md has a line for each file.
Nothing is imported here, so that `import megarl.algo` imports torch and nothing heavier.
"""

__version__ = "0.2.0"
