"""Where the Megatron-Cores that megarl runs with, 0.16.1 and 0.19.2, have the same thing in different places.

Each function looks at what is there, not at a version's number.  Nothing else in `mcore/` asks which one is installed.
"""

from __future__ import annotations

import inspect
from typing import Any

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor


def parts_of(part: Any) -> Any:
    """What a part of a layer is built of: a ModuleSpec says so in 0.16.1, and in 0.19.2 a partial for feed-forwards."""
    return part.submodules if isinstance(part, ModuleSpec) else part.keywords["submodules"]


def grouped_experts(grouped_gemm: bool) -> Any:
    """Transformer Engine's experts; 0.16.1 can be asked for Megatron's old grouped ones too, which are not wanted."""
    make = TESpecProvider().grouped_mlp_modules
    return make(grouped_gemm, *[False] * (len(inspect.signature(make).parameters) - 1))


def counted_gradients(part: Any) -> list[Tensor]:
    """The gradients of an optimizer's part that are in the global norm."""
    name = "get_grads_for_grad_norm" if hasattr(part, "get_grads_for_grad_norm") else "get_main_grads_for_grad_norm"
    gradients: list[Tensor] = getattr(part, name)()
    return gradients


def norms_of_groups(optimizer: Any, chunk: Any) -> dict[str | None, float]:
    """The norms of gradients that 0.19.2 keeps out of the global one: of detached MTP layers.  A collective there."""
    return optimizer._compute_grad_norms_by_group() if getattr(chunk.config, "mtp_detach_heads", False) else {}
