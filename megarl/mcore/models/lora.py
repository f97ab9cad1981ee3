"""LoRA (Hu et al., arXiv:2106.09685): low-rank additions to Megatron's linears, under every layout.

A target y = W x becomes y = W x + scaling * B A x, where W is frozen, A [rank, in] starts random and B [out, rank] at
zero.  Megatron fuses q, k, v and gate, up into one linear each; here every projection has its own A and B, so they
equal those of an adapter for the separate projections.  For a column-parallel linear each rank has the whole A and its
rows of B; for a row-parallel linear its columns of A and the whole B.

The adapters are submodules of the linears (`linear_qkv.lora.q_proj.A`) and act through a forward hook: the names and
bytes of the base do not change.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    param_is_not_tensor_parallel_duplicate,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from megarl.mcore.models.model import Model, unwrap

# The linears of a layer -> the projections in each, in the order of its rows.
LINEARS: dict[str, tuple[str, ...]] = {
    "self_attention.linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "self_attention.linear_proj": ("o_proj",),
    "mlp.linear_fc1": ("gate_proj", "up_proj"),
    "mlp.linear_fc2": ("down_proj",),
}
TARGETS = tuple(projection for held in LINEARS.values() for projection in held)


@dataclass(frozen=True)
class LoraSettings:
    """Rank, alpha and targets of adapters.  ValueError for a rank below 1 or unknown targets."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank={self.rank}: expected at least 1")
        if not self.targets or set(self.targets) - set(TARGETS) or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"lora.targets={list(self.targets)}: expected some of {', '.join(TARGETS)}, each once")

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


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
        sharded, repeated, dim = (self.B, self.A, 0) if is_column else (self.A, self.B, 1)
        set_tensor_model_parallel_attributes(sharded, True, dim, 1)
        # An unsharded parameter that gets only this rank's part of a sequence: Megatron sums its gradient over ranks.
        repeated.sequence_parallel = linear.sequence_parallel  # type: ignore[attr-defined]


class Adapter(nn.Module):
    """The adapters of one linear's projections; maps the linear's input to the term added to its output."""

    def __init__(self, linear: Any, rows: dict[str, int], runs: int, settings: LoraSettings, name: str) -> None:
        """`rows`: of each projection on this rank; the linear repeats their order `runs` times."""
        super().__init__()
        self.rows, self.runs, self.scaling = rows, runs, settings.scaling
        self.sequence_parallel, self.tp_group = linear.sequence_parallel, linear.tp_group
        self.is_column = isinstance(linear, ColumnParallelLinear)
        for projection in (p for p in rows if p in settings.targets):
            self.add_module(projection, LowRank(rows[projection], linear, settings.rank, f"{name}.{projection}"))

    @property
    def projections(self) -> dict[str, LowRank]:
        return dict(self.named_children())  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """The linear's input [s, b, in] -> [s, b, out], in the shape of its output."""
        parts = self.projections
        low = F.linear(x, torch.cat([p.A for p in parts.values()]))
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


def apply_lora(model: Model, settings: LoraSettings, *, seed: int = 0) -> None:
    """Freeze a model of `build_model` and adapt its targets; after loading weights, before making the optimizer.

    Every layout starts with the same adapters: each A is drawn as a whole, from `seed` and its name.  ValueError if a
    layer has no such linear (experts, latent attention).
    """
    for chunk in model:
        _adapt(unwrap(chunk), settings, seed)


def _adapt(gpt: Any, settings: LoraSettings, seed: int) -> None:
    gpt.requires_grad_(False)
    for layer in gpt.decoder.layers:
        for path, projections in LINEARS.items():
            if not set(projections) & set(settings.targets):
                continue
            name = f"layers.{layer.layer_number - 1}.{path}"
            linear = _linear(layer, path, settings)
            rows, runs = _rows(gpt.config, path, linear)
            linear.lora = Adapter(linear, rows, runs, settings, f"{seed} {name}")
            linear.lora.hook = linear.register_forward_hook(_add)
    gpt.lora_settings = settings


def settings_of(model: Model) -> LoraSettings | None:
    """None for a model without adapters."""
    return getattr(unwrap(model[0]), "lora_settings", None)


def adapted(model: Model) -> Iterator[tuple[str, Any]]:
    """(path with the layer's number in the whole model, linear) of every linear that has an adapter (`.lora`)."""
    for layer in (layer for chunk in model for layer in unwrap(chunk).decoder.layers):
        for path in LINEARS:
            linear = _find(layer, path)
            if hasattr(linear, "lora"):
                yield f"decoder.layers.{layer.layer_number - 1}.{path}", linear


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
        linear.lora.hook.remove()
        del linear.lora
    for chunk in model:
        del unwrap(chunk).lora_settings


def sharded_state(chunk: nn.Module) -> dict[str, Any]:
    """The adapters for a checkpoint: {name in this chunk: sharded tensor under the name in the whole model}."""
    names = {id(param): name for name, param in unwrap(chunk).named_parameters()}
    groups = {"dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {}
    for path, linear in adapted([chunk]):
        for name, param in linear.lora.named_parameters():
            how = {**groups, "tp_group": linear.tp_group}
            key = f"{path}.lora.{name}"
            if getattr(param, "tensor_model_parallel", False):
                shard = make_tp_sharded_tensor_for_checkpoint(param, key, tp_axis=param.partition_dim, **how)
            else:
                shard = make_sharded_tensor_for_checkpoint(param, key, **how)
            state[names[id(param)]] = shard
    return state


def identity(model: Model) -> dict[str, Any] | None:
    """Settings of the adapters and a digest of the base model; the same under every layout.  A collective."""
    settings = settings_of(model)
    return None if settings is None else {**asdict(settings), "targets": [*settings.targets], "base": _digest(model)}


def _digest(model: Model) -> int:
    """Digest of the frozen parameters: the sum of their bits as integers, with a factor for each parameter name.

    A sum does not depend on how a parameter is cut; padding is zero and adds nothing.  Experts are left out.
    """
    total = sum(_digest_of(unwrap(chunk)) for chunk in model)
    summed = torch.tensor([total % 2**40], device=next(model[0].parameters()).device)
    dist.all_reduce(summed, group=ps.get_model_parallel_group())
    return int(summed) % 2**40


def _digest_of(gpt: Any) -> int:
    total, numbers = 0, [layer.layer_number for layer in gpt.decoder.layers]
    for name, param in gpt.named_parameters():
        counts = param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param)
        if param.requires_grad or not counts or not getattr(param, "allreduce", True):
            continue
        parts = name.split(".")
        whole = ".".join(str(numbers[int(p)]) if parts[i - 1] == "layers" else p for i, p in enumerate(parts))
        bits = param.detach().view(torch.int32 if param.dtype is torch.float32 else torch.int16)
        total += int(bits.sum(dtype=torch.int64)) * _number(whole)
    return total


def _add(linear: Any, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
    """Forward hook of an adapted linear."""
    out, bias = output
    return out + linear.lora(args[0]), bias


def _find(layer: nn.Module, path: str) -> Any:
    block, name = path.split(".")
    return getattr(getattr(layer, block), name, None)


def _linear(layer: Any, path: str, settings: LoraSettings) -> Any:
    linear = _find(layer, path)
    if not isinstance(linear, ColumnParallelLinear | RowParallelLinear):
        unwanted = [p for p in LINEARS[path] if p in settings.targets]
        raise ValueError(
            f"lora.targets={list(settings.targets)}: layer {layer.layer_number - 1} of this model has no {path} "
            f"(experts and latent attention take no adapters); expected targets without {', '.join(unwanted)}"
        )
    return linear


def _rows(config: Any, path: str, linear: Any) -> tuple[dict[str, int], int]:
    """Rows of each projection in one repetition of this rank's linear, and the number of repetitions."""
    size = linear.tp_group.size()
    if path == "self_attention.linear_qkv":  # for each group of heads its rows of q, of k, of v
        q, kv, groups = config.num_attention_heads, config.num_query_groups, config.num_query_groups // size
        rows = {"q_proj": q // size, "k_proj": kv // size, "v_proj": kv // size}
        return {name: heads * config.kv_channels for name, heads in rows.items()}, groups
    if path == "mlp.linear_fc1":
        half = linear.output_size // size // 2
        return {"gate_proj": half, "up_proj": half}, 1
    return {LINEARS[path][0]: linear.output_size}, 1


def _initial_a(rank: int, whole_in: int, seed_name: str) -> Tensor:
    """Uniform within 1/sqrt(in): Kaiming initialization with slope sqrt(5), as in PEFT."""
    generator = torch.Generator().manual_seed(_number(seed_name))
    return torch.empty(rank, whole_in).uniform_(-1, 1, generator=generator) / math.sqrt(whole_in)


def _number(text: str) -> int:
    """An odd number that depends only on the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) | 1
