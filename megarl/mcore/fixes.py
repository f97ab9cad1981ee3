"""Fixes for defects of megatron-core 0.16.1, each with a check for the defect; tests fail once upstream has fixed one.

No installed file is changed: a fix replaces a name in the running process, and only if the defect is present.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te
from torch import Tensor

from megarl.mcore.models.rope import turned


def moe_needs_te_gemm() -> bool:
    """Without Transformer Engine, moe_utils:1192 reads a name that only a successful import of it defines."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    return not hasattr(moe_utils, "te_general_gemm")


def fix_moe_te_gemm() -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils

    moe_utils.te_general_gemm = None


def distributed_adamw_loses_step() -> bool:
    """torch's AdamW keeps "step" in its state, but the distributed optimizer does not expect it there.

    It cannot make a state to load into without a step (distrib_optimizer:641), expects the step to be a shard of the
    parameter (:940), and gives all parameters the same step tensor (:821), so each step then counts once per parameter.
    """
    import megatron.core.optimizer as mcore_optimizer

    return mcore_optimizer.Adam is torch.optim.AdamW


def fix_distributed_adamw_step() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if getattr(DistributedOptimizer, "_keeps_step", False):
        return
    state_dict, load_state_dict = DistributedOptimizer.state_dict, DistributedOptimizer.load_state_dict
    put = DistributedOptimizer._set_main_param_and_optimizer_states

    def state_dict_with_step(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if not self.optimizer.state[param]:
                    zeros = torch.zeros_like
                    self.optimizer.state[param].update(
                        step=torch.zeros(()), exp_avg=zeros(param), exp_avg_sq=zeros(param)
                    )
        return state_dict(self)

    @torch.no_grad()
    def put_with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        group, index = self.model_param_group_index_map[model_param]
        param = self.optimizer.param_groups[group]["params"][index]
        return put(self, model_param, {"step": self.optimizer.state[param]["step"], **tensors})

    def load_state_dict_with_own_steps(self: Any, state: dict[str, Any]) -> None:
        load_state_dict(self, state)
        for moments in self.optimizer.state.values():
            moments["step"] = moments["step"].clone()

    DistributedOptimizer.state_dict = state_dict_with_step
    DistributedOptimizer.load_state_dict = load_state_dict_with_own_steps
    DistributedOptimizer._set_main_param_and_optimizer_states = put_with_step
    DistributedOptimizer._keeps_step = True


def mla_sees_te_that_is_not_there() -> bool:
    """multi_latent_attention:46 imports stand-ins for a missing Transformer Engine, and uses them as types at :185."""
    import megatron.core.transformer.multi_latent_attention as mla

    return mla.HAVE_TE and not isinstance(mla.TELinear, type)


def fix_mla_without_te() -> None:
    import megatron.core.transformer.multi_latent_attention as mla

    mla.HAVE_TE = False


def fsdp_asks_for_te_that_is_not_there() -> bool:
    """mcore_fsdp_adapter:184 tests every linear by isinstance against such a stand-in, which is not a type."""
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter as adapter

    linear = getattr(adapter, "TELinear", ())  # 0.19.2 asks by another way
    return linear != () and not isinstance(linear, type)


def fix_fsdp_without_te() -> None:
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter as adapter

    adapter.TELinear = ()  # matches no module


def packed_rope_walks_over_sequences() -> bool:
    """rope_utils:236 slices the angles sequence by sequence, for q and k of every layer, and synchronizes each time.

    For a row of 512 short answers this took a fifth of the forward pass, on each tensor-parallel rank.
    """
    import megatron.core.models.common.embeddings.rope_utils as rope_utils

    return "_get_thd_freqs_on_this_cp_rank" in rope_utils._apply_rotary_pos_emb_thd.__code__.co_names


def fix_packed_rope() -> None:
    import megatron.core.models.common.embeddings.rope_utils as rope_utils

    def rotate(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        *,
        multi_latent_attention: bool | None = None,
        mla_rotary_interleaved: bool = False,  # its name since 0.17
        mscale: float = 1.0,
        cp_group: Any = None,
    ) -> Tensor:
        """[t, n, d] -> the same, rotated; positions start at 0 in each sequence, like those of `freqs`."""
        assert not rotary_interleaved, "no model of ours turns neighbours and leaves them in place"
        cp, rank = cp_group.size(), cp_group.rank()
        in_pairs = bool(multi_latent_attention) or mla_rotary_interleaved
        return turned(t, freqs, cu_seqlens, factor=mscale, in_pairs=in_pairs, cp=cp, rank=rank)

    rope_utils._apply_rotary_pos_emb_thd = rotate


def te_split_is_lost() -> bool:
    """transformer_engine:2290 imports `_SplitAlongDim`, which Transformer Engine 2.20 has elsewhere, without the dash.

    Without it q, k and v are strided parts of one tensor, and backward concatenates their gradients.
    """
    return te.HAVE_TE and te.SplitAlongDim is None


def fix_te_split() -> None:
    import megatron.core.transformer.attention as attention
    from transformer_engine.pytorch.utils import SplitAlongDim

    te.SplitAlongDim = attention.SplitAlongDim = SplitAlongDim.apply


def te_gemm_is_lost() -> bool:
    """transformer_engine:2446 imports `get_workspace`, which Transformer Engine no longer has.

    Without it routers multiply float32 copies of their input: 470 MB in each layer of DeepSeek-V3 at 16,384 tokens.
    """
    return te.HAVE_TE and te.te_general_gemm is None


def fix_te_gemm() -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    def product(
        a: Tensor,
        b: Tensor,
        out_dtype: torch.dtype,
        layout: str = "TN",
        bias: Tensor | None = None,
        grad: bool = False,
    ) -> list[Tensor]:
        """What moe_utils:1192-1229 asks for: [b a^T + bias], and of gradients [b a] for NN, [b^T a] for NT."""
        if grad:  # of numbers in float32, which cuBLASLt would round to TF32 (cublaslt_gemm.cu:446)
            return [(b.T if layout == "NT" else b) @ a]
        (out, *_) = general_gemm(a, b, out_dtype, layout=layout)
        return [out if bias is None else out + bias]  # inside the product it would have to be in float32, too

    te.te_general_gemm = moe_utils.te_general_gemm = product


TE_FIXES = (  # of what megatron-core 0.16.1 does with the Transformer Engine of launch/gpu/trainer.txt
    (te_split_is_lost, fix_te_split),
    (te_gemm_is_lost, fix_te_gemm),
)
FIXES = (
    (moe_needs_te_gemm, fix_moe_te_gemm),
    (fsdp_asks_for_te_that_is_not_there, fix_fsdp_without_te),
    (mla_sees_te_that_is_not_there, fix_mla_without_te),
    (distributed_adamw_loses_step, fix_distributed_adamw_step),
    (packed_rope_walks_over_sequences, fix_packed_rope),
)


def apply() -> None:
    """Apply the fixes for defects that the installed megatron-core has."""
    for present, fix in (*FIXES, *TE_FIXES):
        if present():
            fix()
