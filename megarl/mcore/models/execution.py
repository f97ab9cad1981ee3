"""Execution options of a role: the wrapper, the layers, recomputation, overlap and offload.

They do not change results, except for the rounding of different kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.transformer.moe import fused_a2a

from megarl.arch.megatron_fields import RECOMPUTED

STRATEGIES = ("megatron", "fsdp", "none")
TRANSFORMERS = ("auto", "local", "transformer_engine")
DISPATCHERS = ("auto", "alltoall", "flex")
DEEPEP_RANKS = (2, 4, 8, 16, 32, 64, 128)  # group sizes for which every release of DeepEP has kernels (launch.cuh)
GRANULARITIES = (None, "selective", "full")
METHODS = (None, "uniform", "block")


def has_transformer_engine() -> bool:
    """Whether Megatron could import Transformer Engine and there is a GPU to run it."""
    return torch.cuda.is_available() and transformer_engine.HAVE_TE


def _why_not() -> str:
    """Why there is no Transformer Engine, where Megatron has found none: importing it swallows the reason."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        return f"it cannot be imported ({type(error).__name__}: {str(error).strip()})".replace("\n", " ")
    return "Megatron-Core could not import it"


def has_deep_ep() -> bool:
    """Whether Megatron could import the package deep_ep and there is a GPU to run it."""
    return torch.cuda.is_available() and fused_a2a.HAVE_DEEP_EP


@dataclass(frozen=True)
class ExecutionOptions:
    """The execution options of one role.  ValueError for an unknown value or a contradiction between two."""

    strategy: str = "megatron"  # megatron | fsdp (Megatron-FSDP) | none (one process, no wrapper)
    transformer_impl: str = "auto"  # auto (transformer_engine if installed and on a GPU) | local | ...
    moe_token_dispatcher_type: str = "auto"  # alltoall | flex (DeepEP) | auto (flex where it is installed and fits)
    recompute_granularity: str | None = None  # selective (the core attention) | full (whole layers)
    recompute_method: str | None = None  # of full: uniform (groups of layers) | block (the first layers of a stage)
    recompute_num_layers: int | None = None  # of full: in a group | of a stage
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False  # requires use_distributed_optimizer
    param_offload: bool = False  # parameters and gradient buffers in host memory between a role's calls
    optimizer_offload: bool = False  # the optimizer's state too
    override_transformer_config: Mapping[str, Any] = field(default_factory=dict)  # further fields of TransformerConfig
    override_ddp_config: Mapping[str, Any] = field(default_factory=dict)  # of DistributedDataParallelConfig

    def __post_init__(self) -> None:
        _one_of("strategy", self.strategy, STRATEGIES)
        _one_of("transformer_impl", self.transformer_impl, TRANSFORMERS)
        _one_of("moe_token_dispatcher_type", self.moe_token_dispatcher_type, DISPATCHERS)
        _one_of("recompute_granularity", self.recompute_granularity, GRANULARITIES)
        _one_of("recompute_method", self.recompute_method, METHODS)
        layers, is_full = self.recompute_num_layers, self.recompute_granularity == "full"
        if is_full and (self.recompute_method is None or layers is None or layers < 1):
            raise ValueError(
                "recompute_granularity=full: expected recompute_method uniform or block and recompute_num_layers of "
                f"at least 1, has {self.recompute_method} and {layers}"
            )
        if not is_full and (self.recompute_method, layers) != (None, None):
            raise ValueError(
                f"recompute_granularity={self.recompute_granularity}: recompute_method={self.recompute_method} and "
                f"recompute_num_layers={layers} belong to full; expected null for both"
            )

    @property
    def uses_transformer_engine(self) -> bool:
        """ValueError if it is requested but not available."""
        if self.transformer_impl == "transformer_engine" and not has_transformer_engine():
            raise ValueError(f"transformer_impl=transformer_engine: {_why_not()}; expected auto or local")
        return self.transformer_impl != "local" and has_transformer_engine()

    @property
    def lacks_transformer_engine(self) -> str:
        """Why `auto` takes the local layers on a GPU: slower, with more activations (`local` in a plan); else empty."""
        lacks = self.transformer_impl == "auto" and torch.cuda.is_available() and not has_transformer_engine()
        return _why_not() if lacks else ""

    def dispatcher(self, expert_ranks: int, dtype: torch.dtype) -> str:
        """Megatron's moe_token_dispatcher_type for layers whose experts are shared by `expert_ranks` ranks.

        ValueError if flex is requested but not available.  `auto` takes it where DeepEP's kernels fit: bfloat16, and a
        group size that they are compiled for.
        """
        if self.moe_token_dispatcher_type == "flex" and not has_deep_ep():
            raise ValueError(
                "moe_token_dispatcher_type=flex: the package deep_ep cannot be imported, or there is no GPU; expected "
                "auto or alltoall"
            )
        fits = has_deep_ep() and dtype is torch.bfloat16 and expert_ranks in DEEPEP_RANKS
        chosen = "flex" if fits else "alltoall"
        return chosen if self.moe_token_dispatcher_type == "auto" else self.moe_token_dispatcher_type

    def check_context_parallel(self, size: int) -> None:
        """ValueError for context parallelism on a GPU with local layers: each rank would need a mask and, without a
        flash kernel for it, scores for all pairs of its tokens and the row's tokens."""
        if size > 1 and torch.cuda.is_available() and not self.uses_transformer_engine:
            raise ValueError(
                f"context_parallel_size={size}: on GPUs it needs Transformer Engine's layers, and these are local; "
                "expected 1, or transformer_impl=transformer_engine without adapters"
            )

    def for_adapters(self) -> ExecutionOptions:
        """The same options with local linears, which adapters need.  ValueError if others are requested."""
        if self.transformer_impl == "transformer_engine":
            raise ValueError("transformer_impl=transformer_engine: adapters need transformer_impl auto or local")
        return replace(self, transformer_impl="local")

    def for_dtype(self, dtype: str) -> ExecutionOptions:
        """The same options with local layers for float32, of which Transformer Engine's products keep TF32's 10 bits
        (cublaslt_gemm.cu:446) and which its fused attention does not take.  ValueError if its layers are requested."""
        if dtype != "float32":
            return self
        if self.transformer_impl == "transformer_engine":
            raise ValueError(
                "transformer_impl=transformer_engine: its products round float32 to TF32, and its fused attention "
                "takes no float32; expected dtype=bfloat16, or transformer_impl=auto or local"
            )
        return replace(self, transformer_impl="local")

    def transformer_settings(self) -> dict[str, Any]:
        """Fields of Megatron's TransformerConfig."""
        te = self.uses_transformer_engine
        again = set(self.override_transformer_config.get(RECOMPUTED, ()))
        if not te and (wrong := sorted(again & {"layernorm", "moe_act"})):
            raise ValueError(f"{RECOMPUTED}: {', '.join(wrong)}: only Transformer Engine's layers compute it again")
        return {
            "transformer_impl": "transformer_engine" if te else "local",
            "moe_grouped_gemm": te,  # all experts of a rank in one call; without TE one call for each expert
            "recompute_granularity": self.recompute_granularity,
            "recompute_method": self.recompute_method,
            "recompute_num_layers": self.recompute_num_layers,
        }


def _one_of(key: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{key}={value}: expected one of {', '.join('null' if c is None else c for c in choices)}")
