"""The factors of LoRA adapters on this rank, and what they add to the output of a linear.

For a column-parallel linear each rank has the whole A and its rows of B, for a row-parallel linear its columns of A and
the whole B.  An expert is cut in the same way over its own ranks (`expert_tensor_parallel_size`).  They all see all of
its tokens, and the token dispatcher sums their outputs and the gradients of their inputs, so an expert's adapter does
not communicate.  The gradient of its whole factor is then one term on each rank: `sum_expert_gradients`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn


class LowRank(nn.Module):
    """This rank's part of A and B of one projection, in the linear's dtype."""

    A: nn.Parameter  # [rank, in]
    B: nn.Parameter  # [out, rank]

    def __init__(self, rows: int, linear: Any, rank: int, seed_name: str) -> None:
        super().__init__()
        size, place = linear.tp_group.size(), linear.tp_group.rank()
        whole = _initial_a(rank, linear.input_size, seed_name)
        is_column = isinstance(linear, ColumnParallelLinear)
        own = whole if is_column else whole.chunk(size, dim=1)[place]
        self.A = nn.Parameter(own.contiguous().to(linear.weight))
        self.B = nn.Parameter(linear.weight.new_zeros(rows, rank))
        # The dimension over which the linear's ranks share a factor; None: each has the whole one.
        self.cut: dict[str, int | None] = {"A": None, "B": 0} if is_column else {"A": 1, "B": None}
        for name, param in self.named_parameters():
            _mark(param, linear, is_cut=self.cut[name] is not None)


def _mark(param: Any, linear: Any, *, is_cut: bool) -> None:
    """The attributes by which Megatron reduces a gradient, and counts it once in the norm of all."""
    param.allreduce = linear.weight.allreduce  # False: reduced over the replicas of the expert
    param.tensor_model_parallel = is_cut or linear.is_expert  # else it counts on the first tensor-parallel rank only
    if not is_cut and linear.is_expert:
        param.shared = linear.tp_group.rank() > 0  # counts on the first of the expert's ranks
        param.is_term_of_expert = linear.tp_group.size() > 1
    elif not is_cut:
        # It gets only this rank's part of a sequence: Megatron sums its gradient over the ranks.
        param.sequence_parallel = linear.sequence_parallel


class Adapter(nn.Module):
    """The adapters of one linear's projections; maps the linear's input to the term added to its output."""

    hook: Any  # of the linear, while this is its adapter

    def __init__(
        self, linear: Any, rows: dict[str, int], runs: int, rank: int, scaling: float, adapted: Sequence[str], name: str
    ) -> None:
        """`rows`: of each projection on this rank; the linear repeats their order `runs` times."""
        super().__init__()
        self.rows = rows
        self.runs = runs
        self.scaling = scaling
        self.sequence_parallel, self.tp_group = linear.sequence_parallel, linear.tp_group
        self.is_column, self.is_expert = isinstance(linear, ColumnParallelLinear), linear.is_expert
        for projection in adapted:
            self.add_module(projection, LowRank(rows[projection], linear, rank, f"{name}.{projection}"))

    @property
    def projections(self) -> dict[str, LowRank]:
        return dict(self.named_children())  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """The linear's input [s, b, in] (of latent attention and experts [tokens, in]) -> the shape of its output."""
        parts = self.projections
        low = F.linear(x, torch.cat([p.A for p in parts.values()]))
        if not self.is_expert:
            low = self._enter(low) if self.is_column else self._reduce(low)
        lows = low.chunk(len(parts), dim=-1)
        out = {name: F.linear(own, p.B) for (name, p), own in zip(parts.items(), lows, strict=True)}
        return self.scaling * self._in_rows(out, low)

    def merged(self) -> Tensor:
        """scaling * B A with the rows and columns of the linear's weight on this rank, float32."""
        parts = self.projections
        out = {name: (p.B.float() @ p.A.float()).T for name, p in parts.items()}
        return self.scaling * self._in_rows(out, next(iter(out.values()))).T

    def _enter(self, low: Tensor) -> Tensor:
        """[.., rank] of this rank's tokens -> of all tokens; backward sums the gradients of all ranks' rows of B."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(low, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(low, group=self.tp_group)

    def _reduce(self, low: Tensor) -> Tensor:
        """The sum over the ranks' columns of A, for all tokens, or for this rank's part under sequence parallelism."""
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(low, group=self.tp_group)

    def _in_rows(self, out: dict[str, Tensor], like: Tensor) -> Tensor:
        """Outputs of the projections [.., rows] -> the linear's own order; zeros for a projection without adapter."""
        whole = [out[n] if n in out else like.new_zeros(*like.shape[:-1], rows) for n, rows in self.rows.items()]
        return torch.cat([w.unflatten(-1, (self.runs, -1)) for w in whole], dim=-1).flatten(-2)


def sum_expert_gradients(model: Sequence[nn.Module]) -> None:
    """Sum over the ranks of each expert the gradients of the factors that each of them has whole; a collective.

    Call it once after the backward passes of a step: a sum per step, not one per expert and micro-batch.
    """
    params: Iterable[Any] = (param for chunk in model for param in chunk.parameters())
    gradients = [param.main_grad for param in params if getattr(param, "is_term_of_expert", False)]
    if not gradients:
        return
    summed = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(summed, group=ps.get_expert_tensor_parallel_group())
    for gradient, own in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(own.view_as(gradient))


def number_of(text: str) -> int:
    """An odd number that depends only on the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) | 1


def _initial_a(rank: int, whole_in: int, seed_name: str) -> Tensor:
    """Uniform within 1/sqrt(in): Kaiming initialization with slope sqrt(5), as in PEFT."""
    generator = torch.Generator().manual_seed(number_of(seed_name))
    return torch.empty(rank, whole_in).uniform_(-1, 1, generator=generator) / math.sqrt(whole_in)
