"""The sizes of a tiny model, by which recipes name theirs without transformers' modelling code."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TinySizes:
    """Example: TinySizes(hidden=64, heads=2)"""

    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 384
    max_positions: int = 2048
