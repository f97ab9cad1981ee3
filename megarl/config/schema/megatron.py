"""Keys of a role's parallel layout, recomputation, overlap and offload."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import II


@dataclass
class Megatron:
    tensor_model_parallel_size: int = 1  # ranks that share each matrix
    pipeline_model_parallel_size: int = 1  # ranks that share the layers
    context_parallel_size: int = 1  # ranks that share each sequence
    sequence_parallel: bool = False  # split activations outside the matrices over the tensor-parallel ranks
    use_distributed_optimizer: bool = False  # shard the optimizer's state over the data-parallel ranks
    virtual_pipeline_model_parallel_size: int | None = None  # interleaved stages of each pipeline rank; null = 1
    num_layers_in_first_pipeline_stage: int | None = None  # layers of the first pipeline rank; null = as the others
    num_layers_in_last_pipeline_stage: int | None = None  # layers of the last pipeline rank; null = as the others
    expert_model_parallel_size: int | None = None  # ranks that share the experts of a layer; null = 1
    expert_tensor_parallel_size: int | None = None  # ranks that share each expert; null = tensor_model_parallel_size
    # The keys below change memory and time only, never a result.
    transformer_impl: str = "auto"  # auto (of bfloat16 transformer_engine if installed) | local | transformer_engine
    moe_token_dispatcher_type: str = "auto"  # alltoall | flex (DeepEP) | auto (flex if deep_ep is installed and fits)
    recompute_granularity: str | None = None  # activation recomputation: selective (core attention) | full (layers)
    recompute_method: str | None = None  # full: uniform (groups of layers) | block (the first layers of a stage)
    recompute_num_layers: int | None = None  # full: layers per group (uniform), recomputed layers per stage (block)
    overlap_grad_reduce: bool = False  # reduce gradients during the backward pass
    overlap_param_gather: bool = False  # distributed optimizer: gather parameters during the forward pass
    param_offload: bool = False  # offload parameters and gradients to host memory while the role is idle
    optimizer_offload: bool = False  # offload the optimizer state to host memory while the role is idle
    override_transformer_config: dict[str, Any] = field(
        default_factory=dict
    )  # further fields of Megatron's TransformerConfig: {batch_p2p_sync:false}; of other roles: empty = the actor's
    override_ddp_config: dict[str, Any] = field(
        default_factory=dict
    )  # further fields of Megatron's DistributedDataParallelConfig: {bucket_size:40000000}; empty = the actor's


@dataclass
class FollowsActor(Megatron):
    """The layout of the critic and of the reference: each key has the actor's value unless it is set.

    The three keys that split a pipeline follow the actor's only with the same number of pipeline ranks (resolve.py).
    """

    tensor_model_parallel_size: int = II("actor.megatron.tensor_model_parallel_size")
    pipeline_model_parallel_size: int = II("actor.megatron.pipeline_model_parallel_size")
    context_parallel_size: int = II("actor.megatron.context_parallel_size")
    sequence_parallel: bool = II("actor.megatron.sequence_parallel")
    use_distributed_optimizer: bool = II("actor.megatron.use_distributed_optimizer")
    virtual_pipeline_model_parallel_size: int | None = field(  # interleaved stages of each pipeline rank;
        default=None  # null = as the actor's if both have the same number of pipeline ranks, else 1
    )
    num_layers_in_first_pipeline_stage: int | None = field(  # layers of the first pipeline rank;
        default=None  # null = as the actor's if both have the same number of pipeline ranks, else as the others
    )
    num_layers_in_last_pipeline_stage: int | None = field(  # layers of the last pipeline rank;
        default=None  # null = as the actor's if both have the same number of pipeline ranks, else as the others
    )
    expert_model_parallel_size: int | None = II("actor.megatron.expert_model_parallel_size")
    expert_tensor_parallel_size: int | None = II("actor.megatron.expert_tensor_parallel_size")
    transformer_impl: str = II("actor.megatron.transformer_impl")
    moe_token_dispatcher_type: str = II("actor.megatron.moe_token_dispatcher_type")
    recompute_granularity: str | None = II("actor.megatron.recompute_granularity")
    recompute_method: str | None = II("actor.megatron.recompute_method")
    recompute_num_layers: int | None = II("actor.megatron.recompute_num_layers")
    overlap_grad_reduce: bool = II("actor.megatron.overlap_grad_reduce")
    overlap_param_gather: bool = II("actor.megatron.overlap_param_gather")
    param_offload: bool = II("actor.megatron.param_offload")
    optimizer_offload: bool = II("actor.megatron.optimizer_offload")
