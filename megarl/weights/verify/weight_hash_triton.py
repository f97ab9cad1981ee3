"""The sums of mixed words of `digests.WeightHash` as a Triton kernel: one pass over the bytes, a program for each tile.

Arithmetic is modulo 2**32, and each sum is computed by one program in a fixed order, so the result is the same bit for
bit as that of the torch operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 8192  # words of a tile; part of the definition of the hash
BLOCK, NUM_WARPS = 1024, 4  # words that a program holds at a time, and its warps


def tile_sums(words: Tensor, first: int) -> Tensor:
    """Like `digests.tile_sums`, as int32 [2, T] of which only the bits count."""
    start = first // TILE
    count = (first + len(words) - 1) // TILE - start + 1
    sums = torch.empty(2, count, dtype=torch.int32, device=words.device)
    _tile_sums_kernel[(count,)](
        words, sums, len(words), first - start * TILE, start, tile=TILE, block=BLOCK, num_warps=NUM_WARPS
    )
    return sums


@triton.jit
def _mix(x):
    """The finalizer of MurmurHash3, on uint32."""
    x ^= x >> 16
    x *= tl.full((), 0x85EBCA6B, tl.uint32)
    x ^= x >> 13
    x *= tl.full((), 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["num_words", "before", "start"])
def _tile_sums_kernel(words, sums, num_words, before, start, tile: tl.constexpr, block: tl.constexpr):
    """`before`: words of the first tile that come before the given ones; `start`: number of the first tile."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * tile - before  # of the tile's first word among the given ones
    low = tl.maximum(-at, 0).to(tl.int32)  # the given words of this tile are number low .. high-1 of the tile
    high = tl.minimum(num_words - at, tile).to(tl.int32)
    number = (start.to(tl.int64) + program).to(tl.uint32) * tile
    high_sum = tl.zeros((block,), dtype=tl.uint32)
    low_sum = tl.zeros((block,), dtype=tl.uint32)
    for offset in range(0, tile, block):
        lane = offset + tl.arange(0, block)
        inside = (lane >= low) & (lane < high)
        word = tl.load(words + at + lane, mask=inside, other=0).to(tl.uint32, bitcast=True)
        place = number + lane.to(tl.uint32)
        first = place * tl.full((), 0x27D4EB2D, tl.uint32) + tl.full((), 0x243F6A88, tl.uint32)
        second = place * tl.full((), 0x165667B1, tl.uint32) + tl.full((), 0x02C74EE7, tl.uint32)
        high_sum += tl.where(inside, _mix(word ^ first ^ ((place << 15) | (place >> 17))), 0).to(tl.uint32)
        low_sum += tl.where(inside, _mix(word ^ second ^ ((place << 13) | (place >> 19))), 0).to(tl.uint32)
    tl.store(sums + program, tl.sum(high_sum, 0).to(tl.int32, bitcast=True))
    tl.store(sums + tl.num_programs(0) + program, tl.sum(low_sum, 0).to(tl.int32, bitcast=True))
