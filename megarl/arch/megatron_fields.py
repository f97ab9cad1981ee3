"""Fields of Megatron-Core's configuration classes that a run may set: they change memory and time, but for MTP's loss.

`override_transformer_config`, `override_ddp_config` and `override_optimizer_config` reach TransformerConfig,
DistributedDataParallelConfig and OptimizerConfig.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, NamedTuple

TRANSFORMER, WRAPPER = "override_transformer_config", "override_ddp_config"
OPTIMIZER = "override_optimizer_config"
CPU_OFFLOAD, OFFLOAD_FRACTION = "optimizer_cpu_offload", "optimizer_offload_fraction"  # fields of OPTIMIZER
OVERRIDES = (TRANSFORMER, WRAPPER)  # of a role's layout; that of the optimizer is in its group of keys
RECOMPUTED, MTP_LOSS_SCALE = "recompute_modules", "mtp_loss_scaling_factor"
_OPTIM = "expected {role}.optim"
_GROUP = "expected {role}.megatron.{field}"


def _each(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


class Field(NamedTuple):
    """What a field does, and the values that it may have: of a type, or some of these, or a list of some of these."""

    does: str
    kind: type = bool
    values: tuple[Any, ...] = ()

    @property
    def wanted(self) -> str:
        """Example: "a whole number"."""
        words = ", ".join(str(value).lower() for value in self.values)
        if self.kind is list:
            return f"[some of {words}]"
        names = {bool: "true or false", int: "a whole number above 0", float: "a number"}
        return words if self.values else names[self.kind]

    def fits(self, value: Any) -> bool:
        """Can the field have this value?"""
        if self.kind is list:
            return isinstance(value, list) and all(one in self.values for one in value)
        if self.kind is float:
            return type(value) in (int, float)
        if self.kind is int:
            return type(value) is int and value > 0
        return type(value) is self.kind and (not self.values or value in self.values)


FUSIONS = ("bias_activation_fusion", "gradient_accumulation_fusion", "apply_rope_fusion", "moe_permute_fusion")
# Each was run, and gives the same gradient (test_override_fields.py, tests/te); those of the optimizer need a GPU.  A
# field that was never run may fail late, or train something else.
TRIED: dict[str, dict[str, Field]] = {
    TRANSFORMER: {
        "batch_p2p_sync": Field("false: stages do not wait for the device behind each exchange"),
        RECOMPUTED: Field(
            "what recompute_granularity=selective computes again, in place of the core attention; other roles follow "
            "the actor's if they have its recompute_granularity",
            list,
            ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"),
        ),
        MTP_LOSS_SCALE: Field("weight of the loss of MTP layers beside the policy's, with actor.mtp; 0.1", float),
        # A fused kernel is on wherever the machine has it.
        **dict.fromkeys(FUSIONS, Field("without this fused kernel", bool, (False,))),
    },
    WRAPPER: {
        "align_param_gather": Field("stages gather parameters at the same time, with overlap_param_gather"),
        "bucket_size": Field("numbers in a bucket of gradients", int),
        "pad_buckets_for_high_nccl_busbw": Field("buckets of the distributed optimizer in sizes that NCCL sends fast"),
    },
    OPTIMIZER: {
        CPU_OFFLOAD: Field("Adam runs on the host, in Megatron's HybridDeviceOptimizer"),
        OFFLOAD_FRACTION: Field("how much of it", float),
        "overlap_cpu_optimizer_d2h_h2d": Field("copies go on while Adam computes"),
    },
}
# Other fields -> by which key they are set, or why they are not.
OWN: dict[str, dict[str, str]] = {
    TRANSFORMER: (
        _each(
            "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
            "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel "
            "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage transformer_impl "
            "moe_token_dispatcher_type recompute_granularity recompute_method recompute_num_layers",
            _GROUP,
        )
        | _each("params_dtype pipeline_dtype bf16 fp16", "expected model.dtype")
        | _each("hidden_dropout attention_dropout", "the policy that is trained must be the one that is sampled: 0")
        | _each("moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff", "rewards alone train the router")
        | _each("moe_router_dtype", "routers compute in float32, since rounding alone would choose other experts")
    ),
    OPTIMIZER: (
        _each("optimizer lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps sgd_momentum", _OPTIM)
        | _each("clip_grad", "expected {role}.max_grad_norm")
        | _each("use_distributed_optimizer overlap_param_gather", _GROUP)
        | _each("bf16 fp16 params_dtype", "expected model.dtype")
    ),
    WRAPPER: (
        _each("use_distributed_optimizer overlap_grad_reduce overlap_param_gather", _GROUP)
        | _each("use_megatron_fsdp data_parallel_sharding_strategy", "expected {role}.strategy=fsdp")
        | _each("grad_reduce_in_fp32", "gradients are always summed in float32")
        | _each("check_for_nan_in_grad check_for_large_grads", "expected trainer.on_nonfinite")
    ),
}


def fault(group: str, field: str, value: Any, role: str) -> str:
    """Why a run cannot set this field of Megatron's; "" if it can."""
    if (found := TRIED[group].get(field)) is not None:
        return "" if found.fits(value) else f"expected {found.wanted}"
    if field in OWN[group]:
        return OWN[group][field].format(role=role, field=field)
    near = get_close_matches(field, TRIED[group], 1, 0.75)
    meant = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(TRIED[group])}"
    return f"a run sets this field itself, was never tried with it, or Megatron has none; {meant}"
