"""Routing replay by the definition: transformers' modelling code, sequence by sequence, with the experts put into it.

A router's weights for given experts are its scores of these, as its family normalises them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from replay_cases import TEMPERATURE
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from megarl.batch import Batch
from megarl.hf_server.names import hub_tensors
from megarl.routed_experts import ROUTED_EXPERTS


def scores_of(config: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """(logits [T, E], experts [T, K]) -> the weights of the experts [T, K]."""
    if config.model_type in ("deepseek_v3", "glm4_moe", "minimax_m2"):
        factor = getattr(config, "routed_scaling_factor", 1.0)

        def sigmoid(logits: Tensor, experts: Tensor) -> Tensor:
            scores = logits.sigmoid().gather(1, experts)
            return factor * scores / (scores.sum(-1, keepdim=True) + 1e-20)

        return sigmoid

    def softmax(logits: Tensor, experts: Tensor) -> Tensor:
        scores = logits.softmax(-1).gather(1, experts)
        renormalised = config.model_type in ("mixtral", "gpt_oss") or config.norm_topk_prob
        return scores / scores.sum(-1, keepdim=True) if renormalised else scores

    return softmax


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Those of all layers, in order; each returns (logits, weights, experts)."""
    layers = [module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.Module)]
    return [layer.router if hasattr(layer, "router") else layer.gate for layer in layers]


class Replaying:
    """A model whose routers take the experts of one row at a time."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        self.given: list[Tensor] = []  # of the row, by layer
        for number, router in enumerate(routers_of(self.model)):
            router.register_forward_hook(self._router(number))

    def _router(self, number: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        scores = scores_of(self.model.config)

        def replace(_: nn.Module, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits = output[0].view(-1, output[0].size(-1))
            return output[0], scores(logits, self.given[number]), self.given[number]

        return replace

    def log_probs(self, tokens: Tensor, experts: Tensor) -> Tensor:
        """tokens [T], experts [T, layers, K] as the column has them -> [T], 0 for the first token."""
        # The token at t is read by the pass that predicts the one at t + 1; the last one may go anywhere.
        last = torch.arange(experts.size(2)).expand(1, *experts.shape[1:])
        self.given = list(torch.cat([experts[1:].long(), last]).unbind(1))
        logits = self.model(input_ids=tokens[None], use_cache=False).logits[0, :-1] / TEMPERATURE
        found = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
        return torch.cat([found.new_zeros(1), found])


def reference_step(folder: str, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The log-probs of all tokens, and the gradient of their weighted sum by name."""
    replaying = Replaying(folder)
    rows = zip(
        batch.tokens.split(batch.lengths.tolist()),
        batch.columns[ROUTED_EXPERTS].split(batch.lengths.tolist()),
        strict=True,
    )
    log_probs = torch.cat([replaying.log_probs(*row) for row in rows])
    (batch.columns["weight"] * log_probs).sum().backward()
    return log_probs.detach(), _gradient(replaying.model)


def _gradient(model: nn.Module) -> dict[str, Tensor]:
    """By the names of a hub folder, which has each expert's matrices for themselves."""
    for param in model.parameters():
        param.data = torch.zeros_like(param) if param.grad is None else param.grad
    config: Any = model.config
    return {name: tensor.detach().clone() for name, tensor in hub_tensors(model, config.model_type).items()}
