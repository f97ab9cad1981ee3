"""Sharded checkpoints: weights and optimizer state by Megatron's parameter names, loadable under another layout.

boxes.py: cuts a run of a flat tensor into boxes; held.py: what a rank holds of each tensor of the whole model;
adapters.py: the same of adapters alone; files.py: the format, written and read by each rank alone; intact.py: whether
files are what was written; checkpoint.py: `save` and `load` of a model; torch_dist.py: reads Megatron's own format.
"""
