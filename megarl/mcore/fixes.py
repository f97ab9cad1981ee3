"""Defects of megatron-core 0.16.1, each with a check that it is still there; tests fail when upstream has mended one.

No installed file is changed: a fix replaces a name in the running process, and only where the defect is present.
"""

from __future__ import annotations

from typing import Any

import torch


def moe_needs_te_gemm() -> bool:
    """Without Transformer-Engine, moe_utils:1192 reads a name that only a successful import of it defines."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    return not hasattr(moe_utils, "te_general_gemm")


def fix_moe_te_gemm() -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils

    moe_utils.te_general_gemm = None


def distributed_adamw_loses_step() -> bool:
    """torch's AdamW keeps "step" in its state, where the distributed optimizer does not expect it.

    It cannot make a state to load into without one (distrib_optimizer:641), wants it to be a part of the parameter
    (:940), and gives all parameters the same tensor (:821), so that a step then counts once for each of them.
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
    """multi_latent_attention:46 imports stand-ins for a missing Transformer-Engine, and uses them as types at :185."""
    import megatron.core.transformer.multi_latent_attention as mla

    return mla.HAVE_TE and not isinstance(mla.TELinear, type)


def fix_mla_without_te() -> None:
    import megatron.core.transformer.multi_latent_attention as mla

    mla.HAVE_TE = False


def fsdp_asks_for_te_that_is_not_there() -> bool:
    """mcore_fsdp_adapter:184 asks of every linear whether it is such a stand-in, which is no type."""
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter as adapter

    return adapter.TELinear != () and not isinstance(adapter.TELinear, type)


def fix_fsdp_without_te() -> None:
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter as adapter

    adapter.TELinear = ()  # nothing is one


FIXES = (
    (moe_needs_te_gemm, fix_moe_te_gemm),
    (fsdp_asks_for_te_that_is_not_there, fix_fsdp_without_te),
    (mla_sees_te_that_is_not_there, fix_mla_without_te),
    (distributed_adamw_loses_step, fix_distributed_adamw_step),
)


def apply() -> None:
    """Mend what is broken in the installed megatron-core."""
    for present, fix in FIXES:
        if present():
            fix()
