"""Attention over rows whose common prefixes stand once (data/prefix_tree.py).

`tree_attention` on CPUs, with `short_attention` for short rows; `flex_tree` on GPUs.
"""
