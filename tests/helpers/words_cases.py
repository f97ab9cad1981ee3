"""A program, because Triton's environment counts from its first import; prints JSON.

With TRITON_INTERPRET=1: {case: [hash by the kernel, hash by torch's operations]}.
Without: the bytes of machine code of the kernel compiled for an H100, which takes no GPU.
"""

import json
import os
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megarl.weights.verify import digests, weight_hash_triton

# Bytes of the updates of one hash: ends within words and tiles, many tiles, a tile filled by several updates.
CASES = ([4], [7], [32768], [32772], [3, 32768 * 2 + 5], [100, 200, 32768, 32768 * 3 + 2], [32768, 32768, 12])


def both(sizes: list[int], device: str = "cpu") -> list[str]:
    g = torch.Generator().manual_seed(sum(sizes))
    pieces = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=g).to(device) for size in sizes]
    found = []
    for tile_sums in (weight_hash_triton.tile_sums, digests.tile_sums):
        with mock.patch.multiple(digests, tile_sums=tile_sums, _gpu_tile_sums=tile_sums):
            words = digests.WeightHash()
            for piece in pieces:
                words.update(piece)
            found.append(words.hexdigest())
    return found


def far(device: str = "cpu") -> list[str]:
    """Words whose numbers do not fit into 32 bits: sums of the tiles, as text."""
    words = torch.arange(10_000, dtype=torch.int32, device=device) * 77_777
    sums = [found(words, 2**33 + 5000) for found in (weight_hash_triton.tile_sums, digests.tile_sums)]
    return [str((each.long() & (2**32 - 1)).tolist()) for each in sums]


def all_cases(device: str = "cpu") -> dict[str, list[str]]:
    return {"far": far(device)} | {str(sizes): both(sizes, device) for sizes in CASES}


def compiled() -> int:
    """Bytes of machine code of the kernel."""
    kernel = weight_hash_triton._tile_sums_kernel
    constexprs = {"tile": weight_hash_triton.TILE, "block": weight_hash_triton.BLOCK}
    kinds = {"words": "*i32", "sums": "*i32", "num_words": "i32", "before": "i32", "start": "i32"}
    signature = {name: "constexpr" if name in constexprs else kinds[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    options = {"num_warps": weight_hash_triton.NUM_WARPS}
    return len(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"])


if __name__ == "__main__":
    print(json.dumps(all_cases() if os.environ.get("TRITON_INTERPRET") == "1" else compiled()))
