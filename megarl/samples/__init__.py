"""The nouns of the ring: prompts, samples with their tokens, and batches of columns.

Knows tensors and the settings of a model's experts; nothing of processes, files or configuration.
"""
