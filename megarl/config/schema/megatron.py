"""How a role lies over its ranks, and how it is computed there."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import II


@dataclass
class Megatron:
    tensor_model_parallel_size: int = 1  # ranks that share every matrix
    pipeline_model_parallel_size: int = 1  # ranks that share the layers
    context_parallel_size: int = 1  # ranks that share a sequence
    sequence_parallel: bool = False  # split the activations outside the matrices over the tensor-parallel ranks
    use_distributed_optimizer: bool = False  # shard the optimizer's state over the data-parallel ranks
    virtual_pipeline_model_parallel_size: int | None = None  # interleaved stages of each pipeline rank; null = 1
    num_layers_in_first_pipeline_stage: int | None = None  # layers of the first pipeline rank; null = as the others
    num_layers_in_last_pipeline_stage: int | None = None  # layers of the last pipeline rank; null = as the others
    expert_model_parallel_size: int | None = None  # ranks to which the experts are dealt; null = 1
    expert_tensor_parallel_size: int | None = None  # ranks that share an expert; null = as tensor_model_parallel_size
    # None of these changes a result, only memory and time.
    transformer_impl: str = "auto"  # auto (transformer_engine where it is installed) | local | transformer_engine
    recompute_granularity: str | None = None  # selective (core attention) | full (layers) are run again in the backward
    recompute_method: str | None = None  # full: uniform (groups of layers) | block (the first layers of a stage)
    recompute_num_layers: int | None = None  # full: layers of a group, or of a stage
    overlap_grad_reduce: bool = False  # sum gradients over ranks while the backward pass runs
    overlap_param_gather: bool = False  # distributed optimizer: gather parameters while the forward pass runs
    param_offload: bool = False  # parameters and gradients wait in host memory while the role has nothing to do
    optimizer_offload: bool = False  # the optimizer's state too

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


@dataclass
class FollowsActor(Megatron):
    """The layout of the critic and of the reference: the actor's, key by key, unless set.

    The three keys that say how a pipeline is cut follow only where there are as many pipeline ranks (resolve.py).
    """

    tensor_model_parallel_size: int = II("actor.megatron.tensor_model_parallel_size")
    pipeline_model_parallel_size: int = II("actor.megatron.pipeline_model_parallel_size")
    context_parallel_size: int = II("actor.megatron.context_parallel_size")
    sequence_parallel: bool = II("actor.megatron.sequence_parallel")
    use_distributed_optimizer: bool = II("actor.megatron.use_distributed_optimizer")
    virtual_pipeline_model_parallel_size: int | None = field(  # interleaved stages of each pipeline rank;
        default=None  # null = as the actor's where both have as many pipeline ranks, else 1
    )
    num_layers_in_first_pipeline_stage: int | None = field(  # layers of the first pipeline rank;
        default=None  # null = as the actor's where both have as many pipeline ranks, else as the others
    )
    num_layers_in_last_pipeline_stage: int | None = field(  # layers of the last pipeline rank;
        default=None  # null = as the actor's where both have as many pipeline ranks, else as the others
    )
    expert_model_parallel_size: int | None = II("actor.megatron.expert_model_parallel_size")
    expert_tensor_parallel_size: int | None = II("actor.megatron.expert_tensor_parallel_size")
    transformer_impl: str = II("actor.megatron.transformer_impl")
    recompute_granularity: str | None = II("actor.megatron.recompute_granularity")
    recompute_method: str | None = II("actor.megatron.recompute_method")
    recompute_num_layers: int | None = II("actor.megatron.recompute_num_layers")
    overlap_grad_reduce: bool = II("actor.megatron.overlap_grad_reduce")
    overlap_param_gather: bool = II("actor.megatron.overlap_param_gather")
    param_offload: bool = II("actor.megatron.param_offload")
    optimizer_offload: bool = II("actor.megatron.optimizer_offload")
