"""A plan carried out by hand in one process, and what every rank must hold afterwards, cut from whole tensors."""

from collections import defaultdict

import torch
from torch import Tensor

from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import ParameterSlice, Sharding
from megarl.weights.reshard.transfers import Transfer

UNTOUCHED = -7.0
Params = dict[str, Tensor]


def whole_tensors(sharding: Sharding) -> Params:
    """HF tensors of random whole numbers, that all types hold exactly."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randint(0, 100, tensor.shape, generator=generator).to(torch.float32)
        for name, tensor in sharding.tensors.items()
    }


def cut_by_hand(sharding: Sharding, rank: int, whole: Params, padding: float = 0.0) -> Params:
    """A rank's parameters, each piece of each mapping copied out of the whole tensors."""
    coordinate, stage, params = sharding.coordinate(rank), sharding.stage(rank), {}
    for op in sharding.table:
        if op.held_by(coordinate):
            for name in sharding.params_on(op, stage):
                params[name] = torch.full(op.shape_at(coordinate), padding)
                for piece in op.pieces_at(coordinate):
                    piece.of_shard(params[name]).copy_(piece.of_hf(whole[piece.hf_name]))
    return params


def at(params: Params, param_slice: ParameterSlice, transfer: Transfer) -> Tensor:
    part = params[param_slice.param] if param_slice.index is None else params[param_slice.param][param_slice.index]
    return part[tuple(slice(s, s + n) for s, n in zip(param_slice.start, transfer.shape, strict=True))]


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
                for param_slice in ours.param_slices:
                    at(params, param_slice, ours).copy_(at(senders[sender], theirs.param_slices[0], theirs))
                    at(written, param_slice, ours).add_(1)
        assert max(int(count.max()) for count in (*came.values(), *written.values())) == 1
        received.append(params)
    return received


def by_peer(transfers: list[Transfer]) -> dict[int, list[Transfer]]:
    found = defaultdict(list)
    for transfer in transfers:
        found[transfer.peer].append(transfer)
    return dict(found)
