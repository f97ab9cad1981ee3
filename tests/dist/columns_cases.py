"""What the ranks of test_columns.py run: they receive a payload of the driver as a worker does, and make its rows."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.group.follow import share_payload
from megarl.layout import Layout
from megarl.mcore.setup import destroy_groups
from megarl.mcore.training.packed_rows import in_whole_turns, make_row, micro_batches
from megarl.processes.connection import from_bytes
from megarl.roles.worker import Worker, _unpack

LAYERS, EXPERTS = 3, 2


def routes_of(sample: int, position: int) -> np.ndarray:
    """[LAYERS, EXPERTS] uint16: numbers that belong to one token of one sample."""
    digest = hashlib.sha256(f"{sample}:{position}".encode()).digest()
    return np.frombuffer(digest[: 2 * LAYERS * EXPERTS], np.uint16).reshape(LAYERS, EXPERTS)


def token_of(sample: int, position: int) -> int:
    """Never 0, which is padding."""
    return 1 + 1000 * sample + position


def routes_at(tokens: Tensor) -> Tensor:
    """What belongs to these tokens: [T, LAYERS, EXPERTS]; 0 at padding."""
    found = [routes_of(*divmod(t - 1, 1000)) if t else np.zeros((LAYERS, EXPERTS), np.uint16) for t in tokens.tolist()]
    return torch.from_numpy(np.array(found, dtype=np.uint16).reshape(len(tokens), LAYERS, EXPERTS))


def receive(layout: Layout, payloads: list[bytes]) -> dict[str, Any]:
    """`payloads`: of the replicas.  Compares the routes with the tokens, in every row and in every batch of a loss.

    Returns the tokens of the real rows of this rank, and how many rows were dummies.
    """
    worker = Worker()
    worker.setup({"layout": asdict(layout), "device": "cpu", "seed": 0, "timeout_s": 60.0}, {})
    try:
        info = worker.rank_info
        given = from_bytes(payloads[info.replica]) if info.is_first else {}
        tensors = share_payload(given, worker.share, info.is_first)
        micros = in_whole_turns(micro_batches(*_unpack(tensors)), layout)
        seen = []
        for micro in micros:
            row, routes = make_row(micro, layout, worker.device), micro.batch.columns["routes"]
            assert routes.dtype == torch.uint16
            assert torch.equal(routes, routes_at(micro.batch.tokens)), "the loss sees the whole micro-batch"
            assert row.slice(routes).dtype == torch.uint16
            assert torch.equal(row.slice(routes), routes_at(row.labels)), "each place has that of what it predicts"
            seen += row.tokens[0][row.tokens[0] > 0].tolist() if not micro.is_dummy else []
        return {"tokens": seen, "dummies": sum(micro.is_dummy for micro in micros), "replica": info.replica}
    finally:
        destroy_groups()
