"""The layers of Nemotron-H and Nemotron-3: each is one thing, a Mamba-2 mixer, attention, a feed-forward or experts.

Needs Megatron-Core 0.19, whose modules are used; what they want of other packages is here in plain torch where these
are not installed: `mamba_ssm` with `causal_conv1d`, and Transformer Engine.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.ssm.gated_delta_net.common import _build_thd_cp_a2a_perm
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from megarl.arch.layers import EXPERTS, LINEAR, MLP
from megarl.mcore.models.attention import cut_over_ranks
from megarl.mcore.models.hybrid import mamba_kernels
from megarl.mcore.models.layers import Whole, local_layer


class GroupNorm(nn.Module):
    """RMS norm of each group's heads; a tensor-parallel rank has whole groups, and the weight of its own heads."""

    def __init__(self, size: int, *, eps: float, group_size: int, dtype: torch.dtype, **_: Any) -> None:
        """`size`: of all groups of this rank.  The other arguments of `mamba_ssm` concern a gate, which is applied."""
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same."""
        groups = mamba_kernels.widened(x).unflatten(-1, (-1, self.group_size))
        normal = F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2)
        return (normal * self.weight).to(x.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """For checkpoints: the weight is cut over tensor-parallel ranks."""
        return cut_over_ranks(self, "weight", prefix, sharded_offsets)


def _reordered(x: Tensor, cp_size: int, packed: PackedSeqParams, *, way: int) -> Tensor:
    """[T, ...], the parts of context-parallel ranks one after another -> in the order of the row; `way` 1: back."""
    return x.index_select(0, _build_thd_cp_a2a_perm(packed.cu_seqlens_q, cp_size, x.size(0))[way])


if mamba_mixer.mamba_split_conv1d_scan_combined is None or mamba_mixer.causal_conv1d_fn is None:
    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.ExtendedRMSNorm = GroupNorm
    mamba_mixer.mamba_split_conv1d_scan_combined = mamba_kernels.mamba_split_conv1d_scan_combined
    mamba_mixer._check_mamba_sequence_packing_support = lambda **_: (True, None)
if mamba_context_parallel.tex is None:
    mamba_context_parallel._undo_attention_load_balancing = partial(_reordered, way=0)
    mamba_context_parallel._redo_attention_load_balancing = partial(_reordered, way=1)
if not moe_layer.HAVE_TE:
    moe_layer.HAVE_TE, moe_layer.TELinear = True, Whole


class Mixer(MambaMixer):
    """Megatron's, in the place of a layer's attention; it knows where the sequences of a row begin."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, d_model=config.hidden_size, d_conv=config.linear_conv_kernel_dim, **kwargs)
        self.norm.eps = config.layernorm_epsilon  # Megatron has 1e-5

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *, packed_seq_params: PackedSeqParams, **_: Any
    ) -> tuple[Tensor, None]:
        """[T, 1, hidden] -> the same.

        Without `seq_idx`, which is computed once for all layers, Megatron takes a row for one sequence, silently.
        """
        if packed_seq_params.seq_idx is None:
            lengths = packed_seq_params.cu_seqlens_q.diff()
            packed_seq_params.seq_idx = torch.repeat_interleave(lengths).to(torch.int32)[None]
        found: tuple[Tensor, None] = super().forward(hidden_states, packed_seq_params=packed_seq_params)
        return found


def mixed_layer(config: Any, number: int) -> ModuleSpec:
    """Layer `number` of the model, from 0: half of a layer of Megatron's, the other half does nothing."""
    spec, kind = local_layer(config, number), config.layer_kinds[number]
    parts = spec.submodules
    if kind in (MLP, EXPERTS):
        parts.input_layernorm = parts.self_attention = IdentityOp
        parts.self_attn_bda = IdentityFuncOp
        return spec
    parts.pre_mlp_layernorm = parts.mlp = IdentityOp
    parts.mlp_bda = IdentityFuncOp
    if kind == LINEAR:
        provider: Any = gpt_layer_specs.LocalSpecProvider()
        column, row = provider.column_parallel_linear(), provider.row_parallel_linear()
        linears = MambaMixerSubmodules(in_proj=column, out_proj=row)
        parts.self_attention = ModuleSpec(module=Mixer, submodules=linears)
    return spec
