"""Fields of Megatron-Core's configuration classes that a run may set, read from Megatron's source without imports.

`override_transformer_config`, `override_ddp_config` and `override_optimizer_config` reach TransformerConfig,
DistributedDataParallelConfig and OptimizerConfig, except for the fields that are set here already.
"""

from __future__ import annotations

import ast
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

TRANSFORMER, WRAPPER = "override_transformer_config", "override_ddp_config"
OPTIMIZER = "override_optimizer_config"
CPU_OFFLOAD, OFFLOAD_FRACTION = "optimizer_cpu_offload", "optimizer_offload_fraction"  # fields of OPTIMIZER
OVERRIDES = (TRANSFORMER, WRAPPER)  # of a role's layout; that of the optimizer is in its group of keys

# Megatron's class -> its file; the fields of a base class count as its own.
_CLASSES: dict[str, tuple[tuple[str, str], ...]] = {
    TRANSFORMER: (
        ("TransformerConfig", "core/transformer/transformer_config.py"),
        ("ModelParallelConfig", "core/model_parallel_config.py"),
    ),
    OPTIMIZER: (("OptimizerConfig", "core/optimizer/optimizer_config.py"),),
    WRAPPER: (("DistributedDataParallelConfig", "core/distributed/distributed_data_parallel_config.py"),),
}
_MODEL = "the model's config.json sets it"
_PACKED = "packed rows of different lengths, and a loss per token, need the value that it has"
_FUSED = "it is on wherever this machine has the kernel; only false can be set"
_OPTIM = "expected {role}.optim"
_DECOUPLED = "the gradient norm and the clipping read gradients in float32, where Megatron sums them"
_UNUSED = "it would change nothing here"
_GROUP = "expected {role}.megatron.{field}"


def _each(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


FUSIONS = (
    "bias_activation_fusion",
    "gradient_accumulation_fusion",
    "apply_rope_fusion",
    "moe_permute_fusion",
)
# Fields that are set already -> why, or by which key.
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
        | _each(
            "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels layernorm_epsilon "
            "init_method_std normalization activation_func activation_func_clamp_value gated_linear_unit "
            "add_bias_linear add_qkv_bias qk_layernorm softmax_scale softmax_type window_size window_attn_skip_freq "
            "glu_linear_offset num_moe_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_layer_freq "
            "moe_router_topk moe_router_topk_scaling_factor moe_router_pre_softmax moe_router_score_function "
            "moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias moe_router_bias_update_rate "
            "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type "
            "rotary_base rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale "
            "mscale_all_dim mtp_num_layers",
            _MODEL,
        )
        | _each("hidden_dropout attention_dropout", "the policy that is trained must be the one that is sampled: 0")
        | _each("moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff", "rewards alone train the router")
        | _each("moe_router_dtype", "routers compute in float32, since rounding alone would choose other experts")
        | _each("moe_grouped_gemm use_cpu_initialization use_te_activation_func", "it follows from this machine")
        | _each(
            "attention_softmax_in_fp32 calculate_per_token_loss variable_seq_lengths overlap_p2p_comm batch_p2p_comm "
            "deallocate_pipeline_outputs finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func "
            "param_sync_func timers num_microbatches_with_partial_activation_recomputes "
            "moe_pad_expert_input_to_capacity moe_expert_capacity_factor cp_comm_type",
            _PACKED,
        )
    ),
    OPTIMIZER: (
        _each("optimizer lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps sgd_momentum", _OPTIM)
        | _each("decoupled_lr decoupled_min_lr decoupled_weight_decay apply_wd_to_qk_layernorm", _OPTIM)
        | _each(
            "muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_num_ns_steps "
            "muon_tp_mode muon_extra_scale_factor",
            "expected {role}.optim.name=muon, which has an implementation of its own",
        )
        | _each("clip_grad", "expected {role}.max_grad_norm")
        | _each("use_distributed_optimizer overlap_param_gather", _GROUP)
        | _each("bf16 fp16 params_dtype", "expected model.dtype")
        | _each("fp8_recipe reuse_grad_buf_for_mxfp8_param_ag", "weights are trained in bfloat16 or float32")
        | _each("loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis", "only fp16 scales a loss")
        | _each(
            "use_precision_aware_optimizer store_param_remainders main_grads_dtype main_params_dtype exp_avg_dtype "
            "exp_avg_sq_dtype",
            _DECOUPLED,
        )
        | _each("overlap_param_gather_with_optimizer_step", "expected {role}.megatron.overlap_param_gather")
        | _each("log_num_zeros_in_grad barrier_with_L1_time timers config_logger_dir", _UNUSED)
    ),
    WRAPPER: (
        _each("use_distributed_optimizer overlap_grad_reduce overlap_param_gather", _GROUP)
        | _each("use_megatron_fsdp data_parallel_sharding_strategy", "expected {role}.strategy=fsdp")
        | _each("grad_reduce_in_fp32", "gradients are always summed in float32")
        | _each("check_for_nan_in_grad check_for_large_grads", "expected trainer.on_nonfinite")
        | _each("average_in_collective", "the loss is a sum over tokens, with the weights of the whole step")
    ),
}


class Field(NamedTuple):
    """A field's type as plain types of Python and, for a Literal, the values that it may have."""

    kinds: tuple[type, ...]
    choices: tuple[Any, ...] = ()

    @property
    def wanted(self) -> str:
        """Example: "an integer or null"."""
        if self.choices:
            return f"one of {', '.join('null' if choice is None else str(choice) for choice in self.choices)}"
        names = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "null"}
        return " or ".join(names[kind] for kind in self.kinds)

    def fits(self, value: Any) -> bool:
        """Can the field have this value?"""
        if self.choices:
            return value in self.choices
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return type(value) in self.kinds or (is_whole and float in self.kinds)


_PLAIN = {"bool": bool, "int": int, "float": float, "str": str, "None": type(None)}


def fault(group: str, field: str, value: Any, role: str) -> str:
    """Why a run cannot set this field of Megatron's; "" if it can."""
    if field in OWN[group]:
        return OWN[group][field].format(role=role, field=field)
    if group == TRANSFORMER and field in FUSIONS:
        return "" if value is False else _FUSED
    known = fields(group)
    if field not in known:
        can_be_set = [name for name, kind in known.items() if kind is not None and name not in OWN[group]]
        near = get_close_matches(field, can_be_set, 1, 0.75)
        classes = _CLASSES[group][0][0]
        return f"Megatron's {classes} has no such field" + (f"; did you mean {near[0]}?" if near else "")
    kind = known[field]
    if kind is None:
        return "a function, a class or a list of Megatron's cannot be given on a command line"
    return "" if kind.fits(value) else f"expected {kind.wanted}"


@cache
def fields(group: str) -> dict[str, Field | None]:
    """Every field of a class and of its base; None for a type that no word of a command line can have."""
    root = find_spec("megatron")
    assert root is not None and root.submodule_search_locations, "Megatron-Core is installed with this package"
    found: dict[str, Field | None] = {}
    for name, file in _CLASSES[group]:
        path = next(Path(place) / file for place in root.submodule_search_locations if (Path(place) / file).is_file())
        tree = ast.parse(path.read_text())
        node = next(item for item in tree.body if isinstance(item, ast.ClassDef) and item.name == name)
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                found.setdefault(item.target.id, _field(item.annotation))
    return found


def _field(annotation: ast.expr) -> Field | None:
    text = ast.unparse(annotation)
    optional = text.startswith("Optional[")
    inner = text.removeprefix("Optional[").removesuffix("]") if optional else text
    ends = (type(None),) if optional else ()
    if inner in _PLAIN:
        return Field((_PLAIN[inner], *ends))
    if inner.startswith("Literal["):
        values = ast.literal_eval(f"({inner.removeprefix('Literal[').removesuffix(']')},)")
        return Field((), (*values, *((None,) if optional else ())))
    return None
