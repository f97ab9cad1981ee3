"""Layers that have a state in place of keys and values: gated delta nets and Mamba-2 mixers.

`gated_delta` and `mamba` say how a layer is built, with Megatron-Core 0.19's modules; the kernels, in plain torch, are
for machines without those that Megatron-Core takes on GPUs.  `families.py` imports a file when a model needs it.
"""
