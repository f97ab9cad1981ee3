"""Muon (Jordan 2024; Liu et al., arXiv:2502.16982): orthogonalized momentum for the matrices of the layers.

Embeddings, heads, norms and biases get AdamW.  Each projection is one matrix, however Megatron stores it: q, k, v and
gate, up are separated, and tensor-parallel shards are gathered, so that the layout does not change a step.
The update has the size of AdamW's (0.2 sqrt(max(rows, columns))), so that both use the same learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a quintic that is steep at 0 and moves singular values close to 1
NUM_ITERATIONS = 5
LIKE_ADAMW = 0.2  # root mean square of an AdamW step divided by its learning rate


@dataclass(frozen=True)
class Matrix:
    """How a two-dimensional parameter holds one or more projections."""

    group: Any  # the tensor-parallel ranks over which it is sharded
    dim: int | None  # of the cut; None: every rank has all of it
    rows: tuple[int, ...] = ()  # of each projection, in an order that repeats; empty: it is a single matrix

    def whole(self, own: Tensor) -> Tensor:
        """This rank's shard -> the whole parameter; a collective if it is sharded."""
        if self.dim is None or self.group.size() == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(parts, own.contiguous(), group=self.group)
        return torch.cat(parts, dim=self.dim)

    def own(self, whole: Tensor) -> Tensor:
        """The inverse: the whole parameter -> this rank's shard."""
        if self.dim is None or self.group.size() == 1:
            return whole
        return whole.chunk(self.group.size(), dim=self.dim)[self.group.rank()]

    def orthogonal(self, update: Tensor) -> Tensor:
        """This rank's shard of the update, with each projection orthogonalized and scaled to AdamW's size."""
        whole = self.whole(update)
        if not self.rows:
            return self.own(_sized(whole))
        runs = whole.unflatten(0, (-1, sum(self.rows))).split(self.rows, dim=1)
        made = [_sized(part.flatten(0, 1)).unflatten(0, part.shape[:2]) for part in runs]
        return self.own(torch.cat(made, dim=1).flatten(0, 1))


def newton_schulz(matrix: Tensor) -> Tensor:
    """[m, n] -> about U V^T of its singular value decomposition: singular values in 0.7 to 1.2 (except tiny ones).

    In bfloat16 on a GPU, as usual; in float32 on a CPU.
    """
    a, b, c = COEFFICIENTS
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    is_tall = x.size(0) > x.size(1)
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


def _sized(update: Tensor) -> Tensor:
    return newton_schulz(update).to(update.dtype) * (LIKE_ADAMW * math.sqrt(max(update.shape)))


def muon_matrices(named: Iterable[tuple[str, Any]], config: TransformerConfig) -> dict[Tensor, Matrix]:
    """{tensor that the optimizer updates: its matrices} for the parameters that Muon handles.

    These are the layers' matrices, including a router's.
    """
    return {
        getattr(param, "main_param", param): _matrix(name, param, config)
        for name, param in named
        if param.ndim == 2 and param.requires_grad and name.startswith("decoder.layers.")
    }


def _matrix(name: str, param: Any, config: TransformerConfig) -> Matrix:
    is_of_expert = ".experts." in name
    group = ps.get_expert_tensor_parallel_group() if is_of_expert else ps.get_tensor_model_parallel_group()
    dim = param.partition_dim if getattr(param, "tensor_model_parallel", False) else None
    if ".linear_qkv." in name:  # for each group of heads its rows of q, of k, of v
        heads = config.num_attention_heads // config.num_query_groups
        return Matrix(group, dim, (heads * config.kv_channels, config.kv_channels, config.kv_channels))
    if ".linear_fc1." in name and config.gated_linear_unit:  # every rank has its rows of gate, then of up
        return Matrix(group, dim, (param.size(0) // 2,) * 2)
    return Matrix(group, dim)


class Muon(torch.optim.Optimizer):
    """Muon for `matrices`, AdamW for the other parameters of `groups`; weight decay is decoupled for both."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        matrices: dict[Tensor, Matrix],
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self.matrices = matrices
        self.momentum = momentum
        self.betas = betas
        self.eps = eps
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "step": 0})

    def make_state(self) -> None:
        """Make zero state for every parameter, into which a checkpoint is loaded."""
        for group in self.param_groups:
            for param in group["params"]:
                self._state(param)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                is_matrix = param in self.matrices
                update = self._muon(param, param.grad) if is_matrix else self._adam(param, param.grad, group["step"])
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])

    def _state(self, param: Tensor) -> dict[str, Tensor]:
        names = ("momentum_buffer",) if param in self.matrices else ("exp_avg", "exp_avg_sq")
        for name in names:
            self.state[param].setdefault(name, torch.zeros_like(param))
        return self.state[param]

    def _muon(self, param: Tensor, grad: Tensor) -> Tensor:
        """The orthogonalized Nesterov momentum: the gradient mixed with its running mean."""
        mean = self._state(param)["momentum_buffer"]
        mean.lerp_(grad, 1 - self.momentum)
        return self.matrices[param].orthogonal(grad.lerp(mean, self.momentum))

    def _adam(self, param: Tensor, grad: Tensor, step: int) -> Tensor:
        state, (beta1, beta2) = self._state(param), self.betas
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        return mean / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + self.eps)
