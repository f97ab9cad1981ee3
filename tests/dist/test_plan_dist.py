"""Plans carried out between real gloo ranks: what arrives, how it is checked, and what stops before the first byte."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from plan_reference import Params, cut_by_hand, whole_tensors
from spawn import Ranks
from spread_tables import Model

from megarl.weights.mapping.names import Rename
from megarl.weights.reshard.describe import from_json, to_json
from megarl.weights.reshard.exchange import Link, agree, answer, check_messages, check_params, compare, receive, send
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import MegatronSharding, ServerSharding, Sharding
from megarl.weights.reshard.transfers import Message

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
PADDING = -7.0


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
    return _send_all(plan.messages_out(rank, message_bytes), params, link)


def _send_all(messages: list[Message], params: Params, link: Link) -> list[str]:
    sent = send([(link, message) for message in messages], params.__getitem__)
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
        groups = ("tensor_model", "expert_model", "expert_tensor", "pipeline_model")
        theirs = [getattr(parallel_state, f"get_{name}_parallel_rank")() for name in groups]
        parallel_state.destroy_model_parallel()
        sharding = MegatronSharding((), world_size=dist.get_world_size(), layers_per_chunk=(0,) * sizes["pp"], **sizes)
        at = sharding.coordinate(dist.get_rank())
        found.append((theirs, [at.tp_rank, at.ep_rank, at.etp_rank, sharding.stage(dist.get_rank())]))
    return found


DENSE, SPARSE, TIED = Model(num_groups=2), Model(num_experts=4), Model(is_tied=True, vocab_size=21)


def trainer(model: Model, **sizes: Any) -> MegatronSharding:
    return MegatronSharding(model.trainer_table(), dtype="float32", **sizes)


def server(model: Model, **sizes: Any) -> ServerSharding:
    return ServerSharding(model.server_table(), dtype="float32", **sizes)


CASES: dict[str, tuple[Sharding, Sharding, int]] = {
    "tp and pp to two servers": (
        trainer(DENSE, world_size=4, tp=2, pp=2),
        server(DENSE, tp=2, num_replicas=2),
        200,
    ),
    "chunks and context": (trainer(DENSE, world_size=4, pp=2, vpp=2, cp=2), server(DENSE, tp=4), 1 << 20),
    "experts to experts": (trainer(SPARSE, world_size=4, tp=2, pp=1, ep=2, etp=1), server(SPARSE, tp=4, ep=2), 1000),
    "cut experts": (trainer(SPARSE, world_size=4, tp=1, pp=2, ep=1, etp=2), server(SPARSE, tp=2, ep=2), 4000),
    "a tied head in half the type": (
        trainer(TIED, world_size=4, tp=2, pp=2),
        replace(server(TIED, tp=2, num_replicas=2), dtype="bfloat16"),
        300,
    ),
    "to one rank that holds all": (
        trainer(SPARSE, world_size=7, tp=1, etp=1),
        ServerSharding(SPARSE.plain_table(), dtype="float32"),
        16,
    ),
    "from one to seven": (trainer(SPARSE), ServerSharding(SPARSE.plain_table(), dtype="float32", num_replicas=7), 999),
}


def as_text(case: tuple[Sharding, Sharding, int]) -> tuple[str, str, int]:
    return to_json(case[0]), to_json(case[1]), case[2]


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Ranks]:
    with Ranks(8) as ranks:
        ranks.run(os.getpid, timeout_s=600)  # eight processes that import Megatron, perhaps on few cores
        yield ranks


def assert_received(
    receiver: Sharding, rank: int, whole: dict[str, torch.Tensor], held: dict[str, torch.Tensor]
) -> None:
    expected = cut_by_hand(receiver, rank, whole, padding=PADDING)
    assert held.keys() == expected.keys()
    for name, param in expected.items():
        assert torch.equal(held[name], param.to(held[name].dtype)), name


@pytest.mark.full
def test_receivers_hold_what_is_cut_from_whole_tensors_by_hand(eight_ranks: Ranks) -> None:
    by_rank = eight_ranks.run(exchange_all, {name: as_text(case) for name, case in CASES.items()}, timeout_s=120)
    for name, (sender, receiver, _) in CASES.items():
        whole = whole_tensors(sender)
        for rank in range(sender.num_ranks):
            assert by_rank[rank][name] == []
        for rank in range(receiver.num_ranks):
            assert_received(receiver, rank, whole, by_rank[sender.num_ranks + rank][name])


@pytest.mark.full
def test_a_changed_element_is_found_and_named_by_its_sender(eight_ranks: Ranks) -> None:
    name = "experts to experts"
    by_rank = eight_ranks.run(
        exchange_all, {name: as_text(CASES[name])}, "model.layers.2.mlp.experts.w13_weight", timeout_s=60
    )
    found = sorted(fault for rank in range(4) for fault in by_rank[rank][name])
    assert found == [
        f"model.layers.2.mlp.experts.{expert}.gate_proj.weight[{rows}, 0:8] on rank {rank}"
        for expert, rows, rank in ((0, "0:2", 0), (0, "4:6", 1), (2, "0:2", 2), (2, "4:6", 3))
    ]


def test_ranks_stand_where_megatron_puts_them(eight_ranks: Ranks) -> None:
    layouts = [
        {"tp": 2, "pp": 2, "cp": 2, "ep": 2, "etp": 1},
        {"tp": 2, "pp": 1, "cp": 1, "ep": 4, "etp": 1},
        {"tp": 1, "pp": 2, "cp": 2, "ep": 2, "etp": 2},
        {"tp": 4, "pp": 2, "cp": 1, "ep": 1, "etp": 4},
    ]
    for of_rank in eight_ranks.run(positions, layouts):
        assert all(theirs == ours for theirs, ours in of_rank)


@pytest.mark.full
def test_peak_extra_memory_is_two_messages(two_ranks: Ranks) -> None:
    """1 MB of parameters in another type, cut across; nothing but small change beside the two buffers."""
    table = (Rename("w", "w", (512, 512), 1), Rename("v", "v", (64,)))
    sender, receiver = ServerSharding(table, dtype="float32"), ServerSharding(table, dtype="bfloat16")
    for peak in two_ranks.run(peak_memory, to_json(sender), to_json(receiver), 32_768, timeout_s=300):
        assert 2 * 32_768 <= peak <= 2 * 32_768 + 2048
