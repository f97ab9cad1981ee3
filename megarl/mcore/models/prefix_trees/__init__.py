"""Attention over rows whose common prefixes stand once (data/prefix_tree.py).

`tree_attention` on CPUs, `flex_tree` on GPUs.
"""
