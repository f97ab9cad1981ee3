"""What the ranks of a world do to carry out a plan: the first ones are a trainer's, the next ones servers'."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from plan_reference import Params, cut_by_hand, whole_tensors

from megarl.weights.reshard.describe import from_json
from megarl.weights.reshard.exchange import Link, agree, answer, check_messages, check_params, compare, receive, send
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import MegatronSharding, ServerSharding
from megarl.weights.reshard.transfers import Message

CPU = torch.device("cpu")
PADDING = -7.0


def nothing() -> None:
    """Starts the ranks."""


def exchange_all(cases: dict[str, tuple[str, str, int]], corrupt: str | None = None) -> dict[str, Any]:
    """Each case: the JSON of sender and receiver, and `message_bytes`; the answer of this rank to each."""
    return {name: _exchange(*case, corrupt) for name, case in cases.items()}


def _exchange(sender: str, receiver: str, message_bytes: int, corrupt: str | None) -> Any:
    """What a receiver holds in the end, or the parts that a sender's receivers hold otherwise."""
    plan = Plan(from_json(sender), from_json(receiver), min_cut_bytes=64)
    agree(plan.fingerprint(message_bytes), Link(dist.group.WORLD, {}, CPU, 30.0))
    num_senders, num_receivers = plan.sender.num_ranks, plan.receiver.num_ranks
    rank = dist.get_rank()
    if rank < num_senders:
        link = Link(dist.group.WORLD, {r: num_senders + r for r in range(num_receivers)}, CPU, 30.0)
        return _send(plan, rank, message_bytes, link)
    if rank < num_senders + num_receivers:
        link = Link(dist.group.WORLD, {r: r for r in range(num_senders)}, CPU, 30.0)
        return _receive(plan, rank - num_senders, message_bytes, link, corrupt)
    return None


def _send(plan: Plan, rank: int, message_bytes: int, link: Link) -> list[str]:
    params = cut_by_hand(plan.sender, rank, whole_tensors(plan.sender))
    check_params(plan.sender, rank, params)
    messages = [message for message in plan.messages_out(rank, message_bytes) if message.peer in link.ranks]
    return _send_all(messages, params, link)


def _send_all(messages: list[Message], params: Params, link: Link) -> list[str]:
    sent = send([(link, message) for message in messages], params)
    assert not sent.errors
    return compare(messages, [each.hexdigest() for each in sent.hashes.get(link, ())], link)


def _receive(plan: Plan, rank: int, message_bytes: int, link: Link, corrupt: str | None) -> Params:
    params = {
        name: torch.full(shape, PADDING, dtype=getattr(torch, dtype))
        for name, (shape, dtype) in plan.receiver.shapes(rank).items()
    }
    check_params(plan.receiver, rank, params)
    messages = plan.messages_in(rank, message_bytes)
    check_messages(plan, rank, messages, link)
    assert receive(messages, params, link) == plan.num_bytes(rank)
    if corrupt in params:
        params[corrupt].view(-1)[0] += 1
    answer(messages, params, link)
    return params


def exchange_by_server(sender: str, receiver: str, message_bytes: int) -> Any:
    """One plan for all replicas, one group for each: the trainer's ranks and the replica's."""
    plan = Plan(from_json(sender), from_json(receiver), min_cut_bytes=64)
    num_senders, tp, rank = plan.sender.num_ranks, plan.receiver.tp, dist.get_rank()
    results: list[Any] = []
    for replica in range(plan.receiver.num_replicas):
        theirs = range(replica * tp, (replica + 1) * tp)
        group = dist.new_group(
            [*range(num_senders), *(num_senders + r for r in theirs)], use_local_synchronization=False
        )
        if rank < num_senders:
            link = Link(group, {r: num_senders + i for i, r in enumerate(theirs)}, CPU, 30.0)
            results.append(_send(plan, rank, message_bytes, link))
        elif rank - num_senders in theirs:
            link = Link(group, {r: r for r in range(num_senders)}, CPU, 30.0)
            results.append(_receive(plan, rank - num_senders, message_bytes, link, None))
        dist.barrier()
    return results


def peak_memory(sender: str, receiver: str, message_bytes: int) -> int:
    """Bytes of tensors that this rank had at most while it sent or received, and checked, beside its parameters."""
    plan, rank = Plan(from_json(sender), from_json(receiver)), dist.get_rank()
    sharding, messages = (
        (plan.sender, plan.messages_out(0, message_bytes))
        if rank == 0
        else (plan.receiver, plan.messages_in(0, message_bytes))
    )
    params = {n: torch.zeros(shape, dtype=getattr(torch, dtype)) for n, (shape, dtype) in sharding.shapes(0).items()}
    link = Link(dist.group.WORLD, {0: 1 - rank}, CPU, 30.0)
    with torch.profiler.profile(profile_memory=True) as profile:
        if rank == 0:
            assert _send_all(messages, params, link) == []
        else:
            receive(messages, params, link)
            answer(messages, params, link)
    kept = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            kept += event.nbytes()
            peak = max(peak, kept)
    return peak


def disagree(sender: str, receiver: str) -> tuple[str, str]:
    """The last rank has another description: what each rank is told, and what its parameters hold after that."""
    mine = ServerSharding(from_json(receiver).table, dtype="float64") if dist.get_rank() == 1 else from_json(receiver)
    params = {"w": torch.full((4, 2), PADDING)}
    try:
        agree(Plan(from_json(sender), mine).fingerprint(64), Link(dist.group.WORLD, {}, CPU, 30.0))
    except ValueError as error:
        return str(error), str(params["w"].unique().tolist())
    return "agreed", ""


def positions(layouts: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """Of this rank in each layout, by Megatron-Core's own groups and by ours: tp, ep, etp, pp."""
    found = []
    for sizes in layouts:
        parallel_state.initialize_model_parallel(
            sizes["tp"],
            sizes["pp"],
            context_parallel_size=sizes["cp"],
            expert_model_parallel_size=sizes["ep"],
            expert_tensor_parallel_size=sizes["etp"],
        )
        theirs = [
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
        ]
        parallel_state.destroy_model_parallel()
        sharding = MegatronSharding((), world_size=dist.get_world_size(), layers_per_chunk=(0,) * sizes["pp"], **sizes)
        coordinate = sharding.coordinate(dist.get_rank())
        found.append(
            (theirs, [coordinate.tp_rank, coordinate.ep_rank, coordinate.etp_rank, sharding.stage(dist.get_rank())])
        )
    return found
