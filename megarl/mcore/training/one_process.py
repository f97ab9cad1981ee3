"""Training in one process: gradients summed in float32 beside each parameter, and nothing to reduce."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from torch import Tensor, nn


class OneProcess(_BaseDataParallel):
    """Stands where Megatron's DistributedDataParallel would, without its contiguous buffers and buckets."""

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
        """There is nobody to wait for."""

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        for param in self.trained:
            param.main_grad *= scaling_factor


def _add_to_main(param: Any) -> None:
    """As Megatron's DDP does: a gradient that was added within the matrix product is not added again."""
    if not param.grad_added_to_main_grad or getattr(param, "zero_out_wgrad", False):
        param.main_grad.add_(param.grad)
    param.grad = None
