"""A column that no code knows, from the driver's batch to a rank's tokens: packed, sent, shared and cut as they are."""

import hashlib
from functools import partial

import numpy as np
import pytest
import torch
from spawn import Ranks, run_ranks
from torch import Tensor

from megarl.arch.layout import Layout
from megarl.data.packing import plan
from megarl.group.follow import share_payload
from megarl.group.message import Setup
from megarl.mcore.setup import destroy_groups
from megarl.mcore.training.packed_rows import in_whole_turns, make_row, micro_batches
from megarl.processes.channels.connection import from_bytes, to_bytes
from megarl.roles.handles import payload
from megarl.roles.worker import Worker, _unpack
from megarl.samples.batch import Batch

pytestmark = pytest.mark.dist

LAYERS, EXPERTS = 3, 2
LENGTHS = torch.tensor([5, 9, 3, 11, 7, 2, 8, 6, 4, 10, 5, 9, 3, 7])


def routes_of(token: int) -> np.ndarray:
    """[LAYERS, EXPERTS] uint16: numbers that belong to this token alone; 0 to padding."""
    digest = hashlib.sha256(str(token).encode()).digest()
    return np.frombuffer(digest[: 2 * LAYERS * EXPERTS], np.uint16).reshape(LAYERS, EXPERTS) * bool(token)


def routes_at(tokens: Tensor) -> Tensor:
    """What belongs to these tokens: [T, LAYERS, EXPERTS]."""
    found = [routes_of(token) for token in tokens.tolist()]
    return torch.from_numpy(np.array(found, dtype=np.uint16).reshape(len(tokens), LAYERS, EXPERTS))


def receive(layout: Layout, payloads: list[bytes]) -> tuple[list[int], int]:
    """As a worker does, from the payloads of the replicas.  Compares the routes with the tokens, in every row and in
    every batch of a loss.

    Returns the tokens of the real rows of this rank, and how many rows were dummies.
    """
    worker = Worker()
    worker.setup(Setup(layout, "cpu", 0, 60.0), {})
    try:
        info, seen = worker.rank_info, list[int]()
        given = from_bytes(payloads[info.replica]) if info.is_first else {}
        tensors = share_payload(given, worker.share, info.is_first)
        micros = in_whole_turns(micro_batches(*_unpack(tensors)), layout)
        for micro in micros:
            row, routes = make_row(micro, layout, worker.device), micro.batch.columns["routes"]
            assert routes.dtype == row.slice(routes).dtype == torch.uint16
            assert torch.equal(routes, routes_at(micro.batch.tokens)), "the loss sees the whole micro-batch"
            assert torch.equal(row.slice(routes), routes_at(row.labels)), "each place has that of what it predicts"
            seen += row.tokens[0][row.tokens[0] > 0].tolist() if not micro.is_dummy else []
        return seen, sum(micro.is_dummy for micro in micros)
    finally:
        destroy_groups()


@pytest.mark.parametrize(
    ("num_ranks", "layout", "dummies"),
    [
        (2, Layout(tp=2, sequence_parallel=True), 0),
        (2, Layout(cp=2), 0),
        (2, Layout(pp=2, vpp=2), 1),
        pytest.param(4, Layout(pp=2, vpp=2), 1, marks=pytest.mark.full),
        pytest.param(8, Layout(tp=2, cp=2, pp=2, vpp=2, sequence_parallel=True), 1, marks=pytest.mark.full),
    ],
)
def test_every_rank_has_the_column_of_its_tokens(
    two_ranks: Ranks, num_ranks: int, layout: Layout, dummies: int
) -> None:
    tokens, copies = 1 + torch.arange(int(LENGTHS.sum())), layout.tp * layout.pp
    batch = Batch(tokens, LENGTHS).with_columns(routes=routes_at(tokens))
    plans = plan(LENGTHS.tolist(), num_ranks // (copies * layout.cp), max_tokens=20)
    payloads = [bytes(to_bytes(payload(batch, part, ("routes",)))) for part in plans]
    run = two_ranks.run if num_ranks == 2 else partial(run_ranks, num_ranks)
    found = run(receive, layout, payloads, timeout_s=600)
    assert [of_rank for _, of_rank in found] == [dummies] * num_ranks
    seen = sorted(token for of_rank, _ in found for token in of_rank)
    assert seen == sorted(tokens.tolist() * copies), "each token, on each copy"
