"""The ways from hidden states and a weight to log-probs (and entropy), each a function that bench_logprobs.py times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.mcore.logprobs import fused, fused_torch

BOTH, ONE = ("log_probs", "entropy"), ("log_probs",)


@dataclass(frozen=True)
class Way:
    """`loss(hidden, weight, labels)` is a sum of the columns called `names`."""

    name: str
    names: tuple[str, ...]
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    is_ours: bool = False  # and so adds the weight's gradient to main_grad
    kernels: Any = None  # of ours, if not the machine's own

    @property
    def is_plain(self) -> bool:
        return self.name == "plain"


def ways(device: str) -> list[Way]:
    """Those that this machine has: other packages give log-probs only, and are compared with our own such pass."""
    mine = "triton" if fused.gpu_kernels is not fused_torch and device == "cuda" else "torch"
    found = [Way(mine, BOTH, chunked(BOTH), is_ours=True), Way("plain", BOTH, plain)]
    if mine == "triton":
        found.append(Way("torch", BOTH, chunked(BOTH), is_ours=True, kernels=fused_torch))
    others = [Way(name, ONE, make()) for name, make in OTHERS.items() if device == "cuda" and find_spec(name)]
    return [*found, Way(mine, ONE, chunked(ONE), is_ours=True), *others] if others else found


def missing(device: str) -> str:
    """Why other packages have no rows; empty if they do."""
    if device != "cuda":
        return "liger_kernel and cut_cross_entropy need a GPU"
    absent = [name for name in OTHERS if not find_spec(name)]
    return f"not installed: {', '.join(absent)}" if absent else ""


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Whole logits, log_softmax in float32, and what autograd keeps of them."""
    log_p = (hidden @ weight.T).float().log_softmax(-1)
    log_probs = log_p.gather(-1, labels[:, None])
    return log_probs.sum() - 0.01 * (log_p.exp() * log_p).sum()


def chunked(names: tuple[str, ...]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Ours: the same sum."""

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        columns = fused.columns_of_chunks(fused.Job(names, len(weight)), hidden, weight, labels)
        total = columns["log_probs"].sum()
        return total + 0.01 * columns["entropy"].sum() if "entropy" in columns else total

    return loss


def _liger() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    cross_entropy = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return lambda hidden, weight, labels: -cross_entropy(weight, hidden, labels)


def _cut_cross_entropy() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, labels: -linear_cross_entropy(hidden, weight, labels, reduction="sum")


OTHERS = {"liger_kernel": _liger, "cut_cross_entropy": _cut_cross_entropy}


def inputs(num_tokens: int, vocab_size: int, hidden_size: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Hidden states, weight, labels, of logits that are about normal."""
    g = torch.Generator(device).manual_seed(0)
    where: dict[str, Any] = {"generator": g, "device": device}
    hidden = torch.randn(num_tokens, hidden_size, dtype=dtype, **where)
    weight = torch.randn(vocab_size, hidden_size, dtype=dtype, **where).div_(hidden_size**0.5)
    return [F.normalize(hidden, dim=-1) * hidden_size**0.5, weight, torch.randint(vocab_size, (num_tokens,), **where)]
