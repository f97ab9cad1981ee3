"""One forward pass, or one gradient, over the micro-batches of this rank: the only place of Megatron's loss scaling.

A loss is `sum_t weight_t * token_loss_t` with weights made once for the whole optimizer step.  Megatron, told
`calculate_per_token_loss`, sums gradients over micro-batches and data and context ranks and divides them by the global
number of tokens; so we hand it true token counts (its MoE terms want them) and multiply the loss by their global sum:
the division cancels, and the gradient is that of the loss, however the step was split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megarl.mcore.logprobs import log_probs_and_entropy
from megarl.mcore.model import CriticModel, unwrap
from megarl.mcore.optimizer import Optimizer
from megarl.mcore.rows import Row, make_row
from megarl.mcore.setup import Layout
from megarl.sample import Batch, LossOutput, MicroBatch, Stats, merge_stats

Columns = dict[str, Tensor]
LossFn = Callable[[Batch, Columns], LossOutput]


@dataclass(frozen=True)
class Outputs:
    """Turns a model's output for a row into packed columns [N] of the micro-batch."""

    layout: Layout
    vocab_size: int
    temperature: float = 1.0
    entropy: bool = False

    def __call__(self, model: nn.Module, row: Row, output: Tensor) -> Columns:
        if isinstance(unwrap(model), CriticModel):
            return {"values": row.column(output[0, :, 0])}
        log_probs, entropy = log_probs_and_entropy(
            output[0], row.labels, vocab_size=self.vocab_size, temperature=self.temperature
        )
        columns = {"log_probs": row.column(log_probs)}
        return columns | {"entropy": row.column(entropy)} if self.entropy else columns


def _run(model: nn.Module, rows: list[Row], finish: Callable[[int, Tensor], Any], *, forward_only: bool) -> list[Any]:
    """Megatron's pipeline schedule over these rows; `finish(i, output)` runs on the last stage."""
    # A bf16 model would make a float32 copy of all logits; logprobs.py makes one of a few tokens at a time.
    how = {"fp32_output": False} if unwrap(model).config.bf16 else {}

    def forward_step(indices: Any, chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        i = next(indices)
        row = rows[i]
        output = chunk(row.tokens, row.positions, None, packed_seq_params=row.packed, **how)
        return output, lambda out, non_loss_data=False: finish(i, out)  # noqa: ARG005

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(range(len(rows))),
        model=model,
        num_microbatches=len(rows),
        seq_length=max(row.tokens.size(1) for row in rows),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


@torch.no_grad()
def forward_only(model: nn.Module, micros: list[MicroBatch], outputs: Outputs, device: torch.device) -> list[Columns]:
    """Columns of each micro-batch (dummies left out) on the last pipeline stage; elsewhere an empty list."""
    model.eval()
    rows = [make_row(micro, outputs.layout, device) for micro in micros]
    found = _run(model, rows, lambda i, out: outputs(model, rows[i], out), forward_only=True)
    return [columns for columns, micro in zip(found, micros, strict=False) if not micro.is_dummy]


def backward(
    model: Any,
    micros: list[MicroBatch],
    outputs: Outputs,
    loss_fn: LossFn,
    *,
    num_tokens: int,
    device: torch.device,
) -> Stats:
    """Put the gradient of the optimizer step's loss into Megatron's buffers, reduced over all ranks.

    `num_tokens` is the number of tokens of the whole optimizer step, prompts included, over all data-parallel ranks.
    Returns the statistics of this replica's micro-batches, on the last pipeline stage.
    """
    model.train()
    model.zero_grad_buffer()
    rows = [make_row(micro, outputs.layout, device) for micro in micros]

    def finish(i: int, output: Tensor) -> tuple[Tensor, Tensor, Stats]:
        batch = micros[i].batch
        columns = {name: column.to(device) for name, column in batch.columns.items()}
        result = loss_fn(replace(batch, columns=columns), outputs(model, rows[i], output))
        own = torch.tensor(rows[i].num_own_tokens, dtype=torch.int, device=device)
        return result.loss * num_tokens, own, {} if micros[i].is_dummy else result.stats

    return merge_stats(_run(model, rows, finish, forward_only=False))


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    micros: list[MicroBatch],
    outputs: Outputs,
    loss_fn: LossFn,
    *,
    num_tokens: int,
    device: torch.device,
) -> tuple[Stats, float, float]:
    """One optimizer step: (statistics of this replica, gradient norm before clipping, learning rate)."""
    lr = optimizer.lr
    optimizer.zero_grad()
    stats = backward(model, micros, outputs, loss_fn, num_tokens=num_tokens, device=device)
    grad_norm = optimizer.step()
    return stats, grad_norm, lr
