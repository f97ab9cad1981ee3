"""A batch's columns on their way to the ranks that work on its samples, and back in the order of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.batch import Batch, token_positions
from megarl.data.packing import RankPlan, unpack
from megarl.group import Reply


def payload(batch: Batch, part: RankPlan, columns: tuple[str, ...]) -> dict[str, Tensor]:
    """The samples of a replica with these columns, in the order in which it runs them."""
    mine = batch.keep_columns(*columns).select(part.indices)
    sizes = torch.tensor(part.micro_sizes, dtype=torch.int64)
    frame = {"tokens": mine.tokens.int(), "lengths": mine.lengths, "rows": mine.rows, "micro_sizes": sizes}
    assert not frame.keys() & mine.columns.keys(), f"no column may be called {', '.join(frame)}"
    return frame | dict(mine.columns)


def unpacked(batch: Batch, plans: list[RankPlan], replies: list[Reply], name: str) -> Tensor:
    """A column [N, ...] of the batch; a replica without sequences answers without columns."""
    parts = [reply.tensors[name] for reply in replies if name in reply.tensors]
    return unpack(plans, parts, batch.sample_lengths.tolist())


def with_values(column: Tensor | None, batch: Batch, samples: list[int], values: Tensor) -> Tensor:
    """A column [N] of the batch, None for zeros, with these values of the tokens of these samples."""
    column = torch.zeros(batch.num_tokens) if column is None else column
    return column.index_copy(0, token_positions(batch.sample_lengths, torch.tensor(samples)), values)
