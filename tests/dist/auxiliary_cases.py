"""What runs on the ranks of test_auxiliary_splits.py: a step of a model with experts whose routers have losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from loss_cases import CPU, Models
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.algo import ActorLoss, step_columns
from megarl.batch import Batch
from megarl.layout import Layout
from megarl.mcore.models.model import unwrap
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.mcore.training.packed_rows import micro_batches
from megarl.mcore.training.step import backward

# Micro-batches of equal cost, by the lengths of their sequences: of 4, so that two context ranks pad nothing.
ROWS = [[8, 4], [12], [4, 4, 4], [4, 8]]
LOSS = ActorLoss("ppo", entropy_coeff=0.05)


@dataclass(frozen=True)
class Routed:
    """A layout, how many of ROWS share a micro-batch, and the coefficients of Megatron's two losses of a router."""

    layout: Layout = Layout()
    rows_per_micro: int = 1
    balance: float = 0.0
    z: float = 0.0


def make_step(vocab_size: int) -> Batch:
    """The sequences of ROWS, end to end."""
    g = torch.Generator().manual_seed(6)
    lengths = torch.tensor([length for row in ROWS for length in row])
    n = int(lengths.sum())
    mask = torch.rand(n, generator=g) < 0.7
    mask[lengths.cumsum(0) - lengths] = False
    columns = {"advantages": torch.randn(n, generator=g), "old_log_probs": -4 + 0.3 * torch.randn(n, generator=g)}
    batch = Batch(torch.randint(0, vocab_size, (n,), generator=g), lengths, columns | {"response_mask": mask.float()})
    return step_columns(batch, loss=LOSS, agg_mode="token-mean")


def run_routed(folder: str, cases: Sequence[Routed]) -> list[dict[str, Tensor]]:
    """The gradient of each case, whole, on rank 0."""
    return [_run(folder, case) for case in cases]


def _run(folder: str, case: Routed) -> dict[str, Tensor]:
    rank_info = make_groups(case.layout)
    try:
        models = Models({"actor": folder}, case.layout)
        model = models("actor")
        config = unwrap(model[0]).config
        config.moe_aux_loss_coeff, config.moe_z_loss_coeff = case.balance, case.z or None
        for module in (module for chunk in model for module in chunk.modules()):
            if isinstance(module, TopKRouter):
                module.routing_type = "aux_loss"
        batch = make_step(models.hf["vocab_size"])
        sizes = [len(row) for row in ROWS]
        first = [sum(sizes[:i]) for i in range(len(sizes))]
        mine = range(rank_info.replica, len(ROWS), rank_info.num_replicas)  # the rows are dealt out
        own = batch.select([first[row] + i for row in mine for i in range(sizes[row])]).keep_columns(*LOSS.columns)
        counts = [sizes[row] for row in mine]
        joined = [sum(counts[i : i + case.rows_per_micro]) for i in range(0, len(counts), case.rows_per_micro)]
        backward(
            model,
            micro_batches(own, joined),
            models.outputs(LOSS.outputs),
            LOSS,
            num_tokens=batch.num_tokens,
            device=CPU,
        )
        whole = models.gradients("actor")
        return whole if dist.get_rank() == 0 else {}
    finally:
        destroy_groups()
