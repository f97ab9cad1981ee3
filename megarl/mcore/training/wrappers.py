"""The wrappers of strategies fsdp and none, instead of Megatron's DistributedDataParallel.

Megatron-FSDP shards parameters, gradients and optimizer state over data- (and context-) parallel ranks.  A transformer
layer's parameters are whole only while it computes; parameters outside the layers are whole from the first forward pass
of a step to its end.  `OneProcess` trains in one process: gradients are summed in float32 and never reduced over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig, FullyShardedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megarl.mcore.models.model import VocabularyHead, unwrap

MOMENTS = ("exp_avg", "exp_avg_sq")


def wrap_fsdp(chunk: nn.Module) -> FullyShardedDataParallel:
    """Shard a model, keeping its present weights.

    Megarl multiplies by the head's weight outside the model.  Its gradient would then come before that of the model's
    output, with which Megatron-FSDP begins a backward pass: it would reduce the head's bucket, in which the embedding
    and the final norm are too, a second time.
    """
    if isinstance(head := getattr(unwrap(chunk), "output_layer", None), VocabularyHead):
        head.in_graph = not unwrap(chunk).share_embeddings_and_output_weights
    settings = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,  # sharded gradients and parameters imply both overlaps
        overlap_param_gather=True,
        grad_reduce_in_fp32=True,
        average_in_collective=False,
    )
    config: Any = chunk.config
    where = next(chunk.parameters()).device
    return FullyShardedDataParallel(config, settings, chunk, fsdp_unit_modules=[TransformerLayer], device=where)


def fsdp_shards(chunk: FullyShardedDataParallel) -> tuple[list[Tensor], list[Tensor]]:
    """The buffers of a wrapped model between steps: of its weights (of both dtypes if there are two), and gradients."""
    release_fsdp(chunk)
    groups = chunk.param_and_grad_buffer.parameter_groups
    held = [x for group in groups for x in (group.model_weight_buffer, group.main_weight_buffer) if x is not None]
    gradients = [group.main_grad_buffer for group in groups if group.main_grad_buffer is not None]
    return [x.data for x in held], [x.data for x in gradients]


def gather_fsdp(chunk: FullyShardedDataParallel) -> None:
    """Make every parameter whole until `release_fsdp`; a collective."""
    chunk.start_param_sync(force_sync=True)
    chunk.module._replace_param_with_raw_if_needed()  # the line above undoes this (megatron_fsdp:1103)
    chunk.module.is_param_fsdp_distributed = True  # so that a state_dict holds whole parameters, not shards


def release_fsdp(chunk: FullyShardedDataParallel) -> None:
    """Free the whole parameters; each rank keeps its shards."""
    chunk.module.is_param_fsdp_distributed = False
    chunk.module.synchronize_param_gather()


class FsdpOptimizer(DistributedOptimizer):
    """Megatron's, with our checkpoints: each rank writes its own shards, for the same number of ranks and layout.

    (Megatron's own are DTensors for torch's checkpoints, a different format from that of the weights.)
    """

    def make_state(self, step: int) -> None:
        """Make zero moments, as after `step` steps, into which a checkpoint is loaded."""
        for group in self.optimizer.param_groups:
            group["step"] = step  # Apex's and Transformer Engine's optimizers count steps for a whole group
        for _, param in self._held():
            zeros = {name: torch.zeros_like(param) for name in MOMENTS}
            self.optimizer.state[param].update(zeros, step=torch.tensor(float(step)))

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Copy the model's whole parameters into this rank's shard of the weights, not of the master weights."""
        self._cut(lambda group: [group.model_weight_buffer])

    @torch.no_grad()
    def reload_model_params(self, state_dict: Any = None) -> None:  # noqa: ARG002
        """Copy the model's whole parameters into model and master weights, before the first optimizer step."""
        self._cut(lambda group: [group.model_weight_buffer, group.main_weight_buffer])

    def _cut(self, buffers_of: Callable[[Any], list[Any]]) -> None:
        for chunk in self.model_chunks:
            for group in chunk.param_and_grad_buffer.parameter_groups:
                for buffer in (buffer for buffer in buffers_of(group) if buffer is not None):
                    for i, param in enumerate(group.params):
                        buffer.set_item(i, param.data)

    def _held(self) -> list[tuple[int, Any]]:
        """Parameters of which this rank has a shard; the others have no gradient and no moments here."""
        return [(i, p) for i, p in enumerate(self.get_parameters()) if p._local_tensor.numel()]

    def own_parts(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's shard of each parameter, in the dtype of the optimizer, and of its moments."""
        rank = dist.get_rank()
        for i, param in self._held():
            held = {"weight": param, **{name: self.optimizer.state[param][name] for name in MOMENTS}}
            yield from ((f"fsdp.{rank}.{i}.{name}", tensor._local_tensor.detach()) for name, tensor in held.items())


class OneProcess(_BaseDataParallel):
    """Replaces Megatron's DistributedDataParallel, without its contiguous buffers and buckets."""

    def __init__(self, chunk: nn.Module) -> None:
        super().__init__(config=chunk.config, module=chunk)
        self.ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.trained: list[Any] = [param for param in chunk.parameters() if param.requires_grad]
        for param in self.trained:
            param.main_grad = torch.zeros_like(param, dtype=torch.float32)
            param.grad_added_to_main_grad = False
            param.register_post_accumulate_grad_hook(_add_to_main)

    def zero_grad_buffer(self) -> None:
        for param in self.trained:
            param.main_grad.zero_()
            param.grad_added_to_main_grad = False

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:  # noqa: ARG002
        """Nothing to do in one process."""

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        for param in self.trained:
            param.main_grad *= scaling_factor


def _add_to_main(param: Any) -> None:
    """Like Megatron's DDP: a gradient that was added inside the matrix product is not added again."""
    if not param.grad_added_to_main_grad or getattr(param, "zero_out_wgrad", False):
        param.main_grad.add_(param.grad)
    param.grad = None
