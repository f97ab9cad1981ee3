"""A plan carried out by hand in one process, and what every rank must hold afterwards, cut from whole tensors."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import Place, Spread
from megarl.weights.reshard.transfers import Transfer

UNTOUCHED = -7.0
Params = dict[str, Tensor]


def whole_tensors(spread: Spread) -> Params:
    """HF tensors of random whole numbers, that all types hold exactly."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randint(0, 100, tensor.shape, generator=generator).to(torch.float32)
        for name, tensor in spread.tensors.items()
    }


def cut_by_hand(spread: Spread, rank: int, whole: Params, padding: float = 0.0) -> Params:
    """A rank's parameters, each piece of each mapping copied out of the whole tensors."""
    spot, stage, params = spread.spot(rank), spread.stage(rank), {}
    for op in spread.table:
        if op.held_by(spot):
            for name in spread.params_on(op, stage):
                params[name] = torch.full(op.shape_at(spot), padding)
                for piece in op.pieces_at(spot):
                    piece.of_shard(params[name]).copy_(piece.of_hf(whole[piece.hf_name]))
    return params


def at(params: Params, place: Place, transfer: Transfer) -> Tensor:
    part = params[place.param] if place.index is None else params[place.param][place.index]
    return part[tuple(slice(s, s + n) for s, n in zip(place.start, transfer.shape, strict=True))]


def carry_out(plan: Plan, whole: Params) -> list[Params]:
    """What the receivers hold after all transfers; asserts that both ends of each pair list the same ones.

    Also asserts that no byte is sent twice to a rank, and that no place is written twice.
    """
    senders = [cut_by_hand(plan.sender, rank, whole) for rank in range(plan.sender.num_ranks)]
    outgoing = {rank: by_peer(plan.sends(rank)) for rank in range(len(senders))}
    received = []
    for rank in range(plan.receiver.num_ranks):
        params = {name: torch.full_like(p, UNTOUCHED) for name, p in cut_by_hand(plan.receiver, rank, whole).items()}
        written = {name: torch.zeros_like(param) for name, param in params.items()}
        came = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        incoming = by_peer(plan.receives(rank))
        assert {s for s in outgoing if rank in outgoing[s]} == incoming.keys()
        for sender, transfers in incoming.items():
            for theirs, ours in zip(outgoing[sender][rank], transfers, strict=True):
                assert (theirs.hf_name, theirs.box, theirs.dtype) == (ours.hf_name, ours.box, ours.dtype)
                came[ours.hf_name][tuple(slice(*side) for side in ours.box)] += 1
                for place in ours.places:
                    at(params, place, ours).copy_(at(senders[sender], theirs.places[0], theirs))
                    at(written, place, ours).add_(1)
        assert max(int(count.max()) for count in (*came.values(), *written.values())) == 1
        received.append(params)
    return received


def by_peer(transfers: list[Transfer]) -> dict[int, list[Transfer]]:
    found = defaultdict(list)
    for transfer in transfers:
        found[transfer.peer].append(transfer)
    return dict(found)
