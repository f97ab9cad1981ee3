"""Keys of a role's optimizer and learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megarl.megatron_fields import CPU_OFFLOAD


@dataclass
class Optim:
    name: str = "adamw"  # adamw | sgd | muon (matrices; adamw for the rest)
    lr: float = 1e-6  # peak learning rate; of `megarl sft`, if it is not set: 0.05 / hidden_size
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # adamw, muon: decay of adamw's two moments
    eps: float = 1e-8  # adamw, muon: added to the square root of the second moment
    weight_decay: float = 0.01  # decoupled, per unit of learning rate
    momentum: float | None = None  # of sgd and muon; null = 0 for sgd, 0.95 for muon
    lr_warmup_steps: int = 0  # warm-up from 0 to lr
    lr_decay_style: str = "constant"  # constant | linear | cosine, after the warm-up
    lr_decay_steps: int | None = None  # steps until min_lr, warm-up included; null = the whole run
    min_lr: float = 0.0  # learning rate at the end of the decay
    override_optimizer_config: dict[str, Any] = field(
        default_factory=dict
    )  # fields of Megatron's OptimizerConfig: {optimizer_cpu_offload:true,optimizer_offload_fraction:1.0}: on the host

    @property
    def on_host(self) -> bool:
        """Whether adam runs on the host, where its moments are."""
        return bool(self.override_optimizer_config.get(CPU_OFFLOAD))


@dataclass
class CriticOptim(Optim):
    lr: float = 1e-5  # peak learning rate; does not follow the actor's: about 10 times it, as the value head is new
