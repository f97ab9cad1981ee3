"""Gradient buffers, Megatron's optimizer, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megarl.arch.layout import Layout
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.layers import check_trainable
from megarl.mcore.models.low_rank import sum_expert_gradients
from megarl.mcore.models.model import Model, unwrap
from megarl.mcore.training.cpu_adam import check_cpu_adam, make_host_state, match_trained, refresh_copies
from megarl.mcore.training.gradient_check import uncounted_included
from megarl.mcore.training.muon import Muon, muon_matrices
from megarl.mcore.training.wrappers import FsdpOptimizer, OneProcess, wrap_fsdp
from megarl.mcore.versions import norms_of_groups


@dataclass(frozen=True)
class OptimSettings:
    """One optimizer and its schedule; steps are optimizer steps."""

    name: str = "adamw"  # adamw | sgd | muon
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    momentum: float = 0.0  # of sgd and muon
    max_grad_norm: float = 1.0
    lr_warmup_steps: int = 0
    lr_decay_style: str = "constant"  # constant | linear | cosine
    lr_decay_steps: int = 1  # the step at which min_lr is reached
    min_lr: float = 0.0
    override_optimizer_config: Mapping[str, Any] = field(default_factory=dict)  # fields of Megatron's OptimizerConfig


def learning_rate(settings: OptimSettings, step: int) -> float:
    """The learning rate of optimizer step `step` (the first is 0): linear warm-up, then the configured decay.

    Example, lr_warmup_steps=2, linear to 0 at 4, lr=1: 0.5, 1, 1, 0.5, 0, 0, ...
    """
    if step < settings.lr_warmup_steps:
        return settings.lr * (step + 1) / settings.lr_warmup_steps
    if settings.lr_decay_style == "constant":
        return settings.lr
    done = min(1.0, (step - settings.lr_warmup_steps) / max(1, settings.lr_decay_steps - settings.lr_warmup_steps))
    left = 1.0 - done if settings.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.min_lr + (settings.lr - settings.min_lr) * left


def wrap_for_training(model: Model, layout: Layout, engine: ExecutionOptions = ExecutionOptions()) -> Model:
    """Add float32 gradient buffers and their reduction over data and context parallelism, as the strategy defines them.

    Raises a ValueError for a layout of experts that cannot be trained, or a strategy that does not fit the layout.
    """
    config: Any = model[0].config
    check_trainable(config)
    _check(model, layout, engine)
    config.finalize_model_grads_func = _finish_gradients
    if engine.recompute_granularity == "full" and _has_adapters(model):
        _let_gradients_in(model)
    if engine.strategy == "none":
        return [OneProcess(chunk) for chunk in model]
    if engine.strategy == "fsdp":
        return [wrap_fsdp(chunk) for chunk in model]
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.use_distributed_optimizer,
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=False,  # it raises on one rank while others wait; `gradient_norm` tells all of them
        average_in_collective=False,
        overlap_grad_reduce=engine.overlap_grad_reduce,
        overlap_param_gather=engine.overlap_param_gather,
        **engine.override_ddp_config,
    )
    # The chunks after the first are reduced while others compute: buckets for them would gain nothing.
    return [DistributedDataParallel(config, settings, x, disable_bucketing=i > 0) for i, x in enumerate(model)]


def reduce_in_last(model: Model) -> None:
    """Let Megatron reduce only the last micro-batch's gradients; before each step, as wrappers may share a config."""
    chunks: list[Any] = model
    if isinstance(chunks[0], DistributedDataParallel) and chunks[0].ddp_config.overlap_grad_reduce:
        contexts = [chunk.no_sync for chunk in chunks]
        chunks[0].config.no_sync_func = contexts[0] if len(chunks) == 1 else contexts


def _finish_gradients(model: Model, *args: Any, **more: Any) -> None:
    """Megatron's reductions of a step's gradients, and those of adapters on experts, which it does not know."""
    finalize_model_grads(model, *args, **more)
    sum_expert_gradients(model)


def _has_adapters(model: Model) -> bool:
    """Of LoRA; indexers of sparse attention are frozen too."""
    return any(name.endswith(".lora") for chunk in model for name, _ in chunk.named_modules())


def _let_gradients_in(model: Model) -> None:
    """Make a frozen embedding's output require a gradient: recomputed layers get gradients only if their input does."""
    for gpt in map(unwrap, model):
        if gpt.pre_process:
            gpt.embedding.register_forward_hook(lambda module, _, out: out.requires_grad_(module.training))


def _check(model: Model, layout: Layout, engine: ExecutionOptions) -> None:
    has_adapters = _has_adapters(model)
    if engine.overlap_param_gather and not layout.use_distributed_optimizer:
        raise ValueError("overlap_param_gather=true: expected use_distributed_optimizer=true, else nothing is gathered")
    if engine.overlap_param_gather and has_adapters:
        raise ValueError("overlap_param_gather=true: adapters are read past Megatron's hooks; expected false with lora")
    if engine.strategy == "fsdp":
        config: Any = model[0].config
        _check_fsdp(layout, has_experts=config.num_moe_experts is not None, has_adapters=has_adapters)
    if engine.strategy == "none" and (dist.get_world_size() > 1 or layout.use_distributed_optimizer):
        raise ValueError(
            f"strategy=none: expected one process and use_distributed_optimizer=false, has {dist.get_world_size()} "
            f"and {str(layout.use_distributed_optimizer).lower()}"
        )


def _check_fsdp(layout: Layout, *, has_experts: bool, has_adapters: bool) -> None:
    if layout.pp > 1 or has_adapters:
        raise ValueError(
            f"strategy=fsdp: expected pipeline_model_parallel_size=1 and no adapters, has {layout.pp} and "
            f"{'some' if has_adapters else 'none'}"
        )
    # Megatron-FSDP doubles the gradient of a parameter that only one rank has, at every micro-batch
    # (param_and_grad_buffer:3253).
    ranks, of_expert = dist.get_world_size(), layout.ep * layout.expert_tp
    if ranks == layout.tp or (has_experts and ranks == of_expert):
        raise ValueError(
            f"strategy=fsdp: expected at least two ranks that share each parameter, and each expert; of {ranks} ranks, "
            f"tensor_model_parallel_size={layout.tp} and expert_model_parallel_size*expert_tensor_parallel_size="
            f"{of_expert} leave one"
        )


def _check_optimizer(name: str, wrapper: DistributedDataParallelConfig, *, has_adapters: bool) -> None:
    if wrapper.use_megatron_fsdp and name != "adamw":
        raise ValueError(f"optim.name={name}: expected adamw with strategy=fsdp")
    if name == "muon" and (wrapper.use_distributed_optimizer or has_adapters):  # it would cut the matrices
        raise ValueError("optim.name=muon: expected use_distributed_optimizer=false and no lora")


class Optimizer:
    """Megatron's optimizer, with a step counter."""

    def __init__(self, model: Model, settings: OptimSettings) -> None:
        self.model = model
        self.settings = settings
        self.step_index = 0
        chunks: list[Any] = list(model)
        config, wrapper = chunks[0].config, chunks[0].ddp_config
        _check_optimizer(settings.name, wrapper, has_adapters=_has_adapters(model))
        is_wrapped = isinstance(chunks[0], DistributedDataParallel)
        check_cpu_adam(settings.override_optimizer_config, name=settings.name, is_wrapped=is_wrapped)
        self.inner: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam" if settings.name == "adamw" else "sgd",  # for muon only its groups are used
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
                use_distributed_optimizer=wrapper.use_distributed_optimizer,
                overlap_param_gather=wrapper.overlap_param_gather,
                **settings.override_optimizer_config,
            ),
            chunks,
            use_gloo_process_groups=False,
        )
        for part in self.parts:
            _number_by_type(part)
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                match_trained(part)
            elif not wrapper.use_megatron_fsdp:
                _fuse_on_gpu(part.optimizer)
        if settings.name == "sgd":  # Megatron has no such function for it (optimizer/__init__:408)
            for part in self.parts:
                part.init_state_fn = _momentum_buffers
        elif settings.name == "muon":
            _replace_by_muon(self, config)
        if wrapper.use_megatron_fsdp:
            self.inner.__class__ = FsdpOptimizer  # it only saves and loads differently
        config.grad_scale_func = self.inner.scale_loss

    @property
    def parts(self) -> list[Any]:
        """Megatron's optimizers: one for the dense parameters and, with expert parallelism, one for the experts."""
        return getattr(self.inner, "chained_optimizers", [self.inner])

    @property
    def is_distributed(self) -> bool:
        """Whether data-parallel ranks hold different runs of the state."""
        return bool(self.inner.config.use_distributed_optimizer)

    @property
    def kind(self) -> str:
        """A description of the optimizer; it can load only checkpoints that were saved with an equal one."""
        dtype = "bfloat16" if self.inner.config.bf16 else "float32"
        ranks = f" strategy=fsdp {self._layout}" if isinstance(self.inner, FsdpOptimizer) else ""
        return f"optim.name={self.settings.name} model.dtype={dtype}{ranks}"

    @property
    def _layout(self) -> str:
        config: Any = self.inner.model_chunks[0].config
        tp, ep = config.tensor_model_parallel_size, config.expert_model_parallel_size
        return f"ranks={dist.get_world_size()} tp={tp} ep={ep} etp={config.expert_tensor_parallel_size}"

    def runs(self) -> Iterator[tuple[nn.Parameter, int, int, dict[str, Tensor]]]:
        """(parameter, start, stop, state) of each run [start, stop) of a flat parameter whose state this rank has.

        `state`: flat or of the parameter's shape, by Megatron's names (exp_avg, ...); `param`: its master weights,
        unless they are the parameter itself.
        """
        for part in self.parts:
            if not part.is_stub_optimizer:
                yield from _distributed_runs(part) if self.is_distributed else self._whole_runs(part)

    def _whole_runs(self, part: Any) -> Iterator[tuple[nn.Parameter, int, int, dict[str, Tensor]]]:
        trained = [p for chunk in self.model for p in unwrap(chunk).parameters() if p.requires_grad]
        by_main = {id(getattr(p, "main_param", p)): p for p in trained}
        for main in (main for group in part.optimizer.param_groups for main in group["params"]):
            param = by_main[id(main)]
            masters = {} if main is param else {"param": main.detach()}
            yield param, 0, param.numel(), masters | _large(part.optimizer.state[main])

    def make_state(self) -> None:
        """Make zero state, as after `step_index` steps, into which a checkpoint is loaded."""
        if isinstance(self.inner, FsdpOptimizer):
            self.inner.make_state(self.step_index)
            return
        for part in self.parts:
            if part.is_stub_optimizer:
                continue
            inner = part.optimizer
            if isinstance(inner, HybridDeviceOptimizer):
                make_host_state(inner, self.step_index)
                continue
            if part.init_state_fn is not None:
                part.init_state_fn(inner)
            for group in inner.param_groups:
                if not isinstance(inner, torch.optim.Adam | torch.optim.SGD):  # those of Apex, Transformer-Engine; Muon
                    group["step"] = self.step_index
                for param in group["params"] if isinstance(inner, torch.optim.Adam) else ():
                    device = param.device if group["fused"] else None
                    inner.state[param]["step"] = torch.tensor(float(self.step_index), device=device)

    def weights_were_read(self) -> None:
        """To be called after weights were read into the parameters, and master weights into theirs."""
        refresh_copies(self.parts)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return learning_rate(self.settings, self.step_index)

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """The global norm of the gradient before clipping, the same on all ranks; a collective.

        Without that of detached MTP layers, which is clipped by its own: they do not change the policy's step.
        NaN or infinite if any rank's gradient is, or if float32 cannot hold the norm: then there must be no `step`.
        """
        needs_scaling = self.inner.prepare_grads()
        assert not needs_scaling, "only fp16 loss scaling skips steps, and fp16 is not offered"
        with uncounted_included(self.parts):
            return float(self.inner.get_grad_norm())

    @torch.no_grad()
    def step(self, grad_norm: float) -> None:
        """Clip, update, advance the schedule, after `gradient_norm`.  Without this call nothing changes."""
        for group in self.inner.param_groups:
            group["lr"] = self.lr * group["lr_mult"]
            group["weight_decay"] = self.settings.weight_decay * group["wd_mult"]  # 0 for norms and biases
        norms = {None: grad_norm} | norms_of_groups(self.inner, self.model[0])
        for part in self.parts:
            params = [] if part.is_stub_optimizer else part.get_parameters()
            for group, norm in norms.items():
                if own := [param for param in params if getattr(param, "grad_norm_group", None) == group]:
                    clip_grad_by_total_norm_fp32(own, self.settings.max_grad_norm, norm)
        self.inner.step_with_ready_grads()
        self.step_index += 1

    def zero_grad(self) -> None:
        self.inner.zero_grad()


def _fuse_on_gpu(inner: torch.optim.Optimizer | None) -> None:
    """Let torch's Adam update parameters on a GPU in one kernel; its default makes temporaries as large as all of them.

    Megatron takes torch's where neither Apex nor Transformer-Engine is installed.
    """
    for group in inner.param_groups if isinstance(inner, torch.optim.Adam) else ():
        if group["params"] and all(param.is_cuda for param in group["params"]):
            group["fused"] = True


def _number_by_type(part: Any) -> None:
    """Megatron's distributed optimizer numbers parameters, then puts those in float32 first (distrib_optimizer:441)."""
    if hasattr(part, "model_fp32_groups"):
        groups = zip(part.model_fp32_groups, part.model_float16_groups, strict=True)
        own = ((p, (group, i)) for group, both in enumerate(groups) for i, p in enumerate(chain(*both)))
        part.model_param_group_index_map = dict(own)


def _distributed_runs(part: Any) -> Iterator[tuple[nn.Parameter, int, int, dict[str, Tensor]]]:
    """Of Megatron's distributed optimizer, from its own table of which run of each parameter this rank has."""
    buckets = (bucket for buffer in part.gbuf_ranges for of_dtype in buffer.values() for bucket in of_dtype)
    for param, ranges in ((param, ranges) for bucket in buckets for param, ranges in bucket["param_map"].items()):
        group, index = part.model_param_group_index_map[param]
        main = part.optimizer.param_groups[group]["params"][index]
        masters = {} if param.dtype == main.dtype else {"param": main.detach()}
        run = ranges["param"]
        yield param, run.start, run.end, masters | _large(part.optimizer.state[main])


def _large(state: dict[str, Any]) -> dict[str, Tensor]:
    """Without step counters, and without the host's copy of the parameter itself."""
    return {n: x for n, x in state.items() if isinstance(x, Tensor) and x.ndim and n != "master_param"}


def _momentum_buffers(optimizer: torch.optim.Optimizer, _: Any = None) -> None:
    """Make the state that a checkpoint is loaded into; a buffer of zeros gives the same first step as no buffer."""
    for group in optimizer.param_groups:
        for param in group["params"] if group["momentum"] else []:
            optimizer.state[param].setdefault("momentum_buffer", torch.zeros_like(param))


def _replace_by_muon(optimizer: Optimizer, config: TransformerConfig) -> None:
    """Replace Megatron's plain SGD by our Muon: groups, float32 master weights and clipping stay Megatron's."""
    settings = optimizer.settings
    named = [pair for chunk in optimizer.model for pair in unwrap(chunk).named_parameters()]
    matrices = muon_matrices(named, config)
    make = partial(
        Muon, matrices=matrices, lr=settings.lr, momentum=settings.momentum, betas=settings.betas, eps=settings.eps
    )
    for part in optimizer.parts:
        part.optimizer = make(part.optimizer.param_groups)
        part.init_state_fn = lambda muon, _=None: muon.make_state()
