"""Optimizer steps on a model of three numbers, for test_optimizer.py; run on a rank, where Megatron has its shims."""

from typing import Any

import torch
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.arch.layout import Layout
from megarl.mcore.setup import make_groups
from megarl.mcore.training.optimizer import Optimizer, OptimSettings, wrap_for_training


class Three(MegatronModule):
    """A matrix [[1, -2]] and a norm's scale [3]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.matrix = torch.nn.Parameter(torch.tensor([[1.0, -2.0]]))
        self.scale = torch.nn.Parameter(torch.tensor([3.0]))


def steps(settings: OptimSettings, gradients: list[list[float]], dtype: str, distributed: bool) -> dict[str, Any]:
    """Weights, gradient norm and learning rate of each step."""
    layout, bf16 = Layout(use_distributed_optimizer=distributed), dtype == "bfloat16"
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, bf16=bf16)
    three = Three(config)
    model = wrap_for_training([Float16Module(config, three) if bf16 else three], layout)
    chunk: Any = model[0]
    optimizer = Optimizer(model, settings)
    found: dict[str, list[Any]] = {"weights": [], "norms": [], "rates": []}
    for first, second, third in gradients:
        optimizer.zero_grad()
        chunk.zero_grad_buffer()
        three.matrix.main_grad.copy_(torch.tensor([[first, second]]))  # type: ignore[attr-defined]
        three.scale.main_grad.copy_(torch.tensor([third]))  # type: ignore[attr-defined]
        chunk.finish_grad_sync()
        found["rates"].append(optimizer.lr)
        found["norms"].append(optimizer.gradient_norm())
        optimizer.step(found["norms"][-1])
        found["weights"].append([*three.matrix.flatten().tolist(), *three.scale.tolist()])
    assert optimizer.step_index == len(gradients)
    return found


def all_steps(cases: dict[str, tuple[OptimSettings, list[list[float]], str, bool]]) -> dict[str, dict[str, Any]]:
    make_groups(Layout())
    return {name: steps(*case) for name, case in cases.items()}
