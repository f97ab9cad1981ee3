"""Causal attention over rows whose common prefixes stand once, on GPUs: one call of torch's FlexAttention for a layer.

The nodes of a tree (data/prefix_tree.py) stand in preorder, so that those below a node are the places behind it, up to
the end of its subtree.  A number for each place therefore says all of the mask: a query sees a key if the key is not
behind it, and the query comes before `seen_until` of the key.  That is the end of the key's subtree, but for the last
place of a node only the next place, since children repeat that token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from megarl.data.prefix_tree import PrefixTree

BLOCK = 128  # queries, and keys, that are read or left out together: torch's default
NARROWEST = 16  # dimensions of a head: Triton multiplies no narrower matrices
VARIANTS = 64  # kernels that a process may compile: of models, with and without windows, gradients, and a second block

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, query, key) -> whether it is seen


@dataclass(frozen=True)
class FlexPlan:
    """The mask of a row, made once for all layers with the same window."""

    seen_until: np.ndarray  # [T] int64, of each place, as a key: behind the last query that sees it
    positions: np.ndarray  # [T] int64, in the sequences
    longest: int  # positions of the longest sequence
    device: torch.device
    masks: dict[tuple[int, int | None], BlockMask] = field(default_factory=dict)  # by places, with padding, and window

    # Rows are padded to whole blocks: no place of a kernel's block is outside of the row, and none is so short that
    # torch takes the kernel for decoding.
    UNIT = BLOCK

    @classmethod
    def of(cls, tree: PrefixTree, device: torch.device) -> FlexPlan:
        return cls(seen_until(tree), tree.place_positions, int((tree.positions + tree.lengths).max()), device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, window: int | None, scale: float) -> Tensor:
        """q [T, n, d], k [T, m, d], v [T, m, e], sinks [n] or None -> [T, n, e], for n a multiple of m.

        Places behind those of the plan are padding, and get zeros.
        """
        width = v.size(-1)
        q, k, v = (_wide_enough(x).transpose(0, 1)[None] for x in (q, k, v))
        mask = self.mask(q.size(2), window)
        attend = partial(fused(), q, k, v, block_mask=mask, scale=scale, enable_gqa=q.size(1) != k.size(1))
        # torch compiles for each model and kind of mask, and would refuse more than 8 of them.
        with torch._dynamo.config.patch(recompile_limit=VARIANTS):
            if sinks is None:
                out = attend()
            else:  # a sink is a key with a value of zeros: it takes its part of the softmax from the others
                found, aux = attend(return_aux=AuxRequest(lse=True))
                out = (found * torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])[..., None]).to(found.dtype)
        return out[0].transpose(0, 1)[..., :width]

    def mask(self, places: int, window: int | None) -> BlockMask:
        """Of a row of so many places, those of the plan and padding, which sees nothing."""
        window = None if window is not None and window >= self.longest else window
        if (places, window) not in self.masks:
            until, at = (_padded(x, places) for x in (self.seen_until, self.positions))
            sees = _mask_of(self._on_device(until), self._on_device(at), window)
            to_mask, whole = _blocks(until, at, window)
            self.masks[places, window] = BlockMask.from_kv_blocks(
                *self._ordered(to_mask),
                *self._ordered(whole),
                BLOCK_SIZE=BLOCK,
                mask_mod=sees,
                seq_lengths=(places, places),
            )
        return self.masks[places, window]

    def _ordered(self, to_read: np.ndarray) -> tuple[Tensor, Tensor]:
        """[1, 1, queries] and [1, 1, queries, keys]: how many blocks of keys to read, and these before the others."""
        counts, order = to_read.sum(1), np.argsort(~to_read, axis=1, kind="stable")
        return self._on_device(counts)[None, None], self._on_device(order)[None, None]

    def _on_device(self, x: np.ndarray) -> Tensor:
        """As int32, which the kernels read."""
        return torch.from_numpy(x).int().to(self.device)


@cache
def fused() -> Callable[..., Any]:
    """FlexAttention as one kernel.

    `dynamic`: the same for rows of all lengths.  `fullgraph`: what cannot be compiled is an error; torch's own way out
    would hold the scores of all pairs of places in memory.
    """
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def seen_until(tree: PrefixTree) -> np.ndarray:
    """[T] int64: for each place, as a key, the place behind the last one that sees it."""
    ends = tree.places + tree.lengths
    for node in range(len(ends) - 1, -1, -1):  # children come after their parent
        if (parent := tree.parents[node]) >= 0:
            ends[parent] = max(ends[parent], ends[node])
    last = tree.places + tree.lengths - 1
    found = np.repeat(ends, tree.lengths)
    found[last] = last + 1
    return found


def _mask_of(until: Tensor, at: Tensor, window: int | None) -> Mask:
    """From `seen_until` and positions, [T] int32 each.

    The window is in a tensor too: torch compiles anew for another number, and not for another tensor.
    """

    def sees(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:  # noqa: ARG001
        return (kv <= q) & (q < until[kv])

    if window is None:
        return sees
    too_far = at - window

    def sees_near(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:  # noqa: ARG001
        return (kv <= q) & (q < until[kv]) & (at[kv] > too_far[q])

    return sees_near


def _blocks(until: np.ndarray, at: np.ndarray, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """[blocks of queries, blocks of keys] bool, twice: what must be masked place by place, and what is seen as a whole.

    From the largest and smallest numbers of each block: torch's `create_block_mask` makes all pairs of places.  Windows
    are judged by them too, so that a block may be read of which all is masked.
    """
    until, at = (_padded(x, -(-len(x) // BLOCK) * BLOCK).reshape(-1, BLOCK) for x in (until, at))
    blocks = np.arange(len(until))
    first = blocks[:, None] * BLOCK  # of a block of queries
    seen = (blocks <= blocks[:, None]) & (until.max(1) > first)
    whole = (blocks < blocks[:, None]) & (until.min(1) >= first + BLOCK)
    if window is not None:
        seen &= at.min(1)[:, None] - at.max(1) < window
        whole &= at.max(1)[:, None] - at.min(1) < window
    return seen & ~whole, whole


def _padded(x: np.ndarray, size: int) -> np.ndarray:
    return np.pad(x, (0, size - len(x)))


def _wide_enough(x: Tensor) -> Tensor:
    """Zeros behind the last dimension if it is too short for the kernel."""
    return x if x.size(-1) >= NARROWEST else F.pad(x, (0, NARROWEST - x.size(-1)))
