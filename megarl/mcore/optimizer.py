"""Gradient buffers, Megatron's optimizer, and the learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import nn

from megarl.mcore.layers import check_trainable
from megarl.mcore.setup import Layout


@dataclass(frozen=True)
class OptimSettings:
    """One optimizer and its schedule; steps are optimizer steps."""

    name: str = "adamw"  # adamw | sgd
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    momentum: float = 0.0  # of sgd
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    decay_style: str = "constant"  # constant | linear | cosine
    decay_steps: int = 1  # the step at which min_lr is reached
    min_lr: float = 0.0


def learning_rate(settings: OptimSettings, step: int) -> float:
    """The rate of optimizer step `step` (the first is 0): linear warm-up, then the decay of the settings.

    Example, warmup_steps=2, linear to 0 at 4, lr=1: 0.5, 1, 1, 0.5, 0, 0, ...
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.decay_style == "constant":
        return settings.lr
    done = min(1.0, (step - settings.warmup_steps) / max(1, settings.decay_steps - settings.warmup_steps))
    left = 1.0 - done if settings.decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.min_lr + (settings.lr - settings.min_lr) * left


def wrap_for_training(model: nn.Module, layout: Layout) -> DistributedDataParallel:
    """Megatron's gradient buffers and their reduction over data and context parallelism, in float32.

    Raises a ValueError for a layout of experts that cannot be trained.
    """
    config: Any = model.config
    check_trainable(config)
    config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.use_distributed_optimizer,
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=True,
        average_in_collective=False,
    )
    return DistributedDataParallel(config, settings, model)


class Optimizer:
    """Megatron's optimizer, which also knows the step it is at."""

    def __init__(self, model: DistributedDataParallel, settings: OptimSettings) -> None:
        self.settings, self.step_index = settings, 0
        config = model.config
        self._has_expert_ranks = config.expert_model_parallel_size > 1
        self.inner: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer={"adamw": "adam", "sgd": "sgd"}[settings.name],
                lr=settings.lr,
                min_lr=settings.min_lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                adam_eps=settings.eps,
                sgd_momentum=settings.momentum,
                clip_grad=settings.max_grad_norm,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=model.ddp_config.use_distributed_optimizer,
            ),
            [model],
        )
        if settings.name == "sgd":  # for which Megatron has no such function (optimizer/__init__:408)
            for part in self.inner.chained_optimizers:
                part.init_state_fn = _momentum_buffers
        config.grad_scale_func = self.inner.scale_loss

    @property
    def kind(self) -> str:
        """What a checkpoint must have been written by to be loaded into it."""
        config = self.inner.config
        sharded = str(config.use_distributed_optimizer).lower()
        dtype = "bfloat16" if config.bf16 else "float32"
        # Megatron gives experts that are dealt to ranks an optimizer of their own, with a state of another form.
        experts = " expert_model_parallel_size>1" if self._has_expert_ranks else ""
        return f"optim.name={self.settings.name} use_distributed_optimizer={sharded} model.dtype={dtype}{experts}"

    @property
    def lr(self) -> float:
        """The rate of the next step."""
        return learning_rate(self.settings, self.step_index)

    def step(self) -> float:
        """Clip, update, advance the schedule; returns the global norm of the gradient before clipping."""
        for group in self.inner.param_groups:
            group["lr"] = self.lr * group["lr_mult"]
            group["weight_decay"] = self.settings.weight_decay * group["wd_mult"]  # 0 for norms and biases
        updated, grad_norm, _ = self.inner.step()
        assert updated, "only fp16 loss scaling skips steps, and fp16 is not offered"
        self.step_index += 1
        return float(grad_norm)

    def zero_grad(self) -> None:
        self.inner.zero_grad()


def _momentum_buffers(optimizer: torch.optim.Optimizer, _: Any = None) -> None:
    """What a checkpoint is loaded into; a buffer of zeros makes the same first step as none."""
    for group in optimizer.param_groups:
        for param in group["params"] if group["momentum"] else []:
            optimizer.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
