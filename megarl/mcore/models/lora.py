"""LoRA (Hu et al., arXiv:2106.09685): low-rank additions to Megatron's linears, under every layout.

A target y = W x becomes y = W x + scaling * B A x, where W is frozen, A [rank, in] starts random and B [out, rank] at
zero.  Targets are projections of attention, latent attention included, and of feed-forwards: dense ones, shared
experts, and every routed expert by itself.  Megatron fuses q, k, v and gate, up into one linear each; here every
projection has its own A and B, so they equal those of an adapter for the separate projections.

The adapters are submodules of the linears (`linear_qkv.lora.q_proj.A`) and act through a forward hook: the names and
bytes of the base do not change.  Several sets of adapters can share a base: `detach` takes a set out, and `attached`
computes with one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from megarl.arch.projections import ALL, LINEARS, TARGETS, chosen
from megarl.mcore.models.low_rank import Adapter
from megarl.mcore.models.model import Model, unwrap, whole_name


@dataclass(frozen=True)
class LoraSettings:
    """Rank, alpha and targets of adapters.  ValueError for a rank below 1 or unknown targets."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL,)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank={self.rank}: expected at least 1")
        known = self.targets == (ALL,) or not set(self.targets) - set(TARGETS)
        if not self.targets or not known or len(set(self.targets)) < len(self.targets):
            raise ValueError(
                f"lora.targets={list(self.targets)}: expected {ALL}, or some of {', '.join(TARGETS)}, each once"
            )

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


class AdapterSet(nn.Module):
    """The adapters of one run, outside of the model: by the path of their linear in the whole model."""

    def __init__(self, settings: LoraSettings, adapters: dict[str, Adapter]) -> None:
        super().__init__()
        self.settings, self.adapters = settings, adapters
        self._held = nn.ModuleList(adapters.values())  # so that `parameters()` finds them


def apply_lora(model: Model, settings: LoraSettings, *, seed: int = 0) -> None:
    """Freeze a model of `build_model` and adapt its targets; after loading weights, before making the optimizer.

    Every layout starts with the same adapters: each A is drawn as a whole, from `seed` and its name.  ValueError for a
    target that the model does not have.
    """
    linears = [pair for chunk in model for pair in _linears(unwrap(chunk))]
    held = {projection for path, _ in linears for projection in LINEARS[_last(path)]}
    targets = chosen(settings.targets, [target for target in TARGETS if target in held])
    for chunk in model:
        chunk.requires_grad_(False)
    adapters = {}
    for path, linear in linears:
        rows, runs = _rows(model[0].config, _last(path), linear)
        if adapted := [projection for projection in rows if projection in targets]:
            name = f"{seed} {path.removeprefix('decoder.')}"
            adapters[path] = Adapter(linear, rows, runs, settings.rank, settings.scaling, adapted, name)
    attach(model, AdapterSet(replace(settings, targets=targets), adapters))


def attach(model: Model, adapters: AdapterSet) -> None:
    """Let a model without adapters compute with these, which were made for it or for another copy of its base."""
    assert settings_of(model) is None, "this model has adapters: detach them before others are attached"
    for path, linear in (pair for chunk in model for pair in _linears(unwrap(chunk))):
        if path in adapters.adapters:
            linear.lora = adapters.adapters[path]
            # Before other hooks: latent attention has one that gathers a linear's output.
            linear.lora.hook = linear.register_forward_hook(_add, prepend=True)
    for chunk in model:
        unwrap(chunk).lora_settings = adapters.settings


def detach(model: Model) -> AdapterSet:
    """Take the adapters out of a model, which then is its base again."""
    settings, taken = settings_in(model), dict[str, Adapter]()
    for path, linear in adapted(model):
        taken[path] = linear.lora
        linear.lora.hook.remove()
        del linear.lora
    for chunk in model:
        del unwrap(chunk).lora_settings
    return AdapterSet(settings, taken)


@contextmanager
def attached(model: Model, adapters: AdapterSet | None) -> Iterator[None]:
    """Inside this context the model computes with these adapters (None: with none); before and after, with none."""
    if adapters is not None:
        attach(model, adapters)
    try:
        yield
    finally:
        if adapters is not None:
            detach(model)


def settings_of(model: Model) -> LoraSettings | None:
    """None for a model without adapters."""
    return getattr(unwrap(model[0]), "lora_settings", None)


def settings_in(model: Model) -> LoraSettings:
    settings = settings_of(model)
    assert settings is not None, "this model has no adapters: apply_lora makes them"
    return settings


def adapted(model: Model) -> Iterator[tuple[str, Any]]:
    """(path in the whole model, linear) of every linear that has an adapter (`.lora`)."""
    for chunk in model:
        yield from [(path, linear) for path, linear in _linears(unwrap(chunk)) if hasattr(linear, "lora")]


@torch.no_grad()
def merged_weight(linear: Any) -> Tensor:
    """A new tensor: this rank's weight of an adapted linear, merged with its adapter, in the weight's type."""
    merged: Tensor = linear.weight + linear.lora.merged()
    return merged.to(linear.weight.dtype)


@torch.no_grad()
def merge(model: Model) -> None:
    """Merge the adapters into the weights and remove them; the model is the same up to the rounding of each weight."""
    for _, linear in adapted(model):
        linear.weight.copy_(merged_weight(linear))
    detach(model)


def _add(linear: Any, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
    """Forward hook of an adapted linear."""
    out, bias = output
    return out + linear.lora(args[0]), bias


def _linears(gpt: Any) -> Iterator[tuple[str, Any]]:
    """(path in the whole model, linear) of every linear of this chunk that can be adapted."""
    for i, layer in enumerate(gpt.decoder.layers):
        for name, module in layer.named_modules():
            if _last(name) in LINEARS and isinstance(module, ColumnParallelLinear | RowParallelLinear):
                yield whole_name(gpt, f"decoder.layers.{i}.{name}"), module


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _rows(config: Any, name: str, linear: Any) -> tuple[dict[str, int], int]:
    """Rows of each projection in one repetition of this rank's linear, and the number of repetitions."""
    if name == "linear_qkv":  # for each group of heads its rows of q, of k, of v
        size = linear.tp_group.size()
        q, kv, groups = config.num_attention_heads, config.num_query_groups, config.num_query_groups // size
        rows = {"q_proj": q // size, "k_proj": kv // size, "v_proj": kv // size}
        return {projection: heads * config.kv_channels for projection, heads in rows.items()}, groups
    projections = LINEARS[name]
    return dict.fromkeys(projections, linear.weight.size(0) // len(projections)), 1
