from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_reference import UNTOUCHED, by_peer, carry_out, cut_by_hand, whole_tensors
from spread_tables import Model

from megarl.weights.mapping.names import Rename
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import MegatronSharding, ServerSharding
from megarl.weights.reshard.transfers import ALIGNMENT, Turns, pack

SIZES = st.sampled_from([1, 2, 4])


@st.composite
def models(draw):
    return Model(
        num_groups=draw(st.sampled_from([1, 2, 8])),
        vocab_size=draw(st.integers(1, 40)),
        num_experts=draw(st.sampled_from([0, 4])),
        is_tied=draw(st.booleans()),
    )


@st.composite
def trainers(draw, model):
    tp, pp, cp, ep, etp = draw(SIZES), draw(SIZES), draw(st.sampled_from([1, 2])), draw(SIZES), draw(SIZES)
    vpp = draw(st.sampled_from([1, 4 // pp]))
    world = pp * max(tp * cp, ep * etp) * draw(st.sampled_from([1, 2]))
    return MegatronSharding(
        model.trainer_table(), world_size=world, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp, dtype="float32"
    )


@st.composite
def servers(draw, model):
    tp, replicas = draw(SIZES), draw(st.sampled_from([1, 2, 3]))
    if draw(st.booleans()):
        return ServerSharding(model.plain_table(), tp=tp, num_replicas=replicas, dtype="float32")
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if tp % n == 0]))
    return ServerSharding(model.server_table(), tp=tp, ep=ep, num_replicas=replicas, dtype="float32")


def shardings(model):
    return st.one_of(trainers(model), servers(model))


@settings(max_examples=60)
@given(st.data(), st.sampled_from([1, 64, 1 << 20]))
def test_receivers_end_with_what_is_cut_from_whole_tensors_by_hand(data, min_cut_bytes):
    model = data.draw(models())
    sender, receiver = data.draw(shardings(model)), data.draw(shardings(model))
    whole = whole_tensors(sender)
    for rank, held in enumerate(carry_out(Plan(sender, receiver, min_cut_bytes=min_cut_bytes), whole)):
        expected = cut_by_hand(receiver, rank, whole, padding=UNTOUCHED)
        assert held.keys() == expected.keys()
        assert all(torch.equal(held[name], expected[name]) for name in expected)


def bytes_of_senders(plan):
    return [sum(t.num_bytes for t in plan.sends(rank)) for rank in range(plan.sender.num_ranks)]


@pytest.mark.parametrize("num_replicas", [1, 3, 4, 6])
def test_replicas_share_the_sending(num_replicas):
    """Two tensor-parallel ranks in four replicas: whatever the number of servers, no sender has 5% above the mean."""
    model = Model(num_layers=8, hidden=64, num_heads=8, head_dim=8, ffn=256, vocab_size=640)
    sender = MegatronSharding(model.trainer_table(), world_size=8, tp=2)
    receiver = ServerSharding(model.server_table(), tp=2, num_replicas=num_replicas)
    plan = Plan(sender, receiver, min_cut_bytes=2048)
    loads = bytes_of_senders(plan)
    received = sum(t.num_bytes for rank in range(receiver.num_ranks) for t in plan.receives(rank))
    assert sum(loads) == received
    assert max(loads) <= 1.05 * sum(loads) / len(loads)


def test_what_tensor_parallel_ranks_hold_alike_is_sent_by_all_of_them():
    table = tuple(Rename(f"p{i}", f"p{i}", (64, 64)) for i in range(8))
    plan = Plan(MegatronSharding(table, world_size=4, tp=2), ServerSharding(table), min_cut_bytes=1024)
    assert bytes_of_senders(plan) == [8 * 64 * 64 * 2 // 4] * 4


def test_small_tensors_go_whole_and_from_many_senders():
    table = tuple(Rename(f"p{i}", f"p{i}", (16,)) for i in range(200))
    plan = Plan(MegatronSharding(table, world_size=4), ServerSharding(table))
    transfers = plan.receives(0)
    assert [(t.hf_name, t.box) for t in transfers] == [(f"p{i}", ((0, 16),)) for i in range(200)]
    assert all(30 <= count <= 70 for count in Counter(t.peer for t in transfers).values())


def test_rows_on_one_side_and_columns_on_the_other_meet_in_rectangles():
    sender = ServerSharding((Rename("w", "w", (4, 6), 0),), tp=2)
    receiver = ServerSharding((Rename("w", "w", (4, 6), 1),), tp=3)
    transfers = Plan(sender, receiver).receives(1)
    assert [(t.peer, t.box, t.param_slices[0].start) for t in transfers] == [
        (0, ((0, 2), (2, 4)), (0, 0)),
        (1, ((2, 4), (2, 4)), (2, 0)),
    ]


def test_a_tensor_kept_twice_on_a_rank_travels_once():
    sender = ServerSharding((Rename("w", "w", (4, 2)),))
    receiver = ServerSharding((Rename("a", "w", (4, 2)), Rename("b", "w", (4, 2), 0)), tp=2)
    transfers = Plan(sender, receiver).receives(1)
    assert [(t.box, [(p.param, p.start) for p in t.param_slices]) for t in transfers] == [
        (((0, 2), (0, 2)), [("a", (0, 0))]),
        (((2, 4), (0, 2)), [("a", (2, 0)), ("b", (0, 0))]),
    ]


def test_slices_travel_in_the_receivers_type():
    table = (Rename("w", "w", (4,)), Rename("bias", "bias", (4,)))
    receiver = ServerSharding(table, dtype="bfloat16", dtypes=(("bias", "float32"),))
    sends = Plan(ServerSharding(table, dtype="float32"), receiver).sends(0)
    assert [(t.hf_name, t.dtype, t.num_bytes) for t in sends] == [("w", "bfloat16", 8), ("bias", "float32", 16)]


def test_models_that_differ_are_refused_with_the_names():
    ours = ServerSharding((Rename("a", "a", (2,)), Rename("b", "b", (2, 3)), Rename("x", "x", (1,))))
    theirs = ServerSharding((Rename("b", "b", (3, 2)), Rename("c", "c", (2,)), Rename("x", "x", (1,))))
    with pytest.raises(ValueError, match="the same model") as refused:
        Plan(ours, theirs)
    assert str(refused.value).endswith(
        "only the receivers have c; only the senders have a; of different shapes are b [2, 3] and [3, 2]"
    )


@pytest.fixture
def plan():
    model = Model(num_experts=4)
    sender = MegatronSharding(model.trainer_table(), world_size=8, tp=2, pp=2, ep=2, etp=1)
    return Plan(sender, ServerSharding(model.server_table(), tp=2, ep=2, num_replicas=3), min_cut_bytes=64)


@pytest.mark.parametrize("message_bytes", [16, 100, 1 << 20])
def test_messages_are_bounded_and_hold_every_transfer_once(plan, message_bytes):
    for rank in range(plan.receiver.num_ranks):
        for peer, transfers in by_peer(plan.receives(rank)).items():
            messages = [m for m in plan.messages_in(rank, message_bytes) if m.peer == peer]
            assert all(m.num_bytes <= message_bytes for m in messages)
            assert all(start % ALIGNMENT == 0 for m in messages for start in m.starts)
            ends = [m.starts[-1] + m.parts[-1].num_bytes for m in messages]
            assert ends == [m.num_bytes for m in messages]
            parts = [part for m in messages for part in m.parts]
            assert sum(part.num_bytes for part in parts) == sum(t.num_bytes for t in transfers)
            assert list(dict.fromkeys(part.hf_name for part in parts)) == list(
                dict.fromkeys(t.hf_name for t in transfers)
            )


def test_a_part_of_a_transfer_lies_inside_its_place():
    plan = Plan(ServerSharding((Rename("w", "w", (6, 2)),)), ServerSharding((Rename("w", "w", (6, 2)),)))
    messages = list(pack(plan.sends(0), 16))
    assert [(m.parts[0].box[0], m.parts[0].param_slices[0].start) for m in messages] == [
        ((0, 4), (0, 0)),
        ((4, 6), (4, 0)),
    ]
    with pytest.raises(ValueError, match="message_bytes=8: expected at least 16"):
        list(pack(plan.sends(0), 8))


@pytest.mark.parametrize("message_bytes", [32, 1 << 20])
def test_ranks_that_take_messages_one_by_one_never_wait_in_a_circle(plan, message_bytes):
    """Both ends must reach a message before it passes, and each rank reaches only its next one."""
    sends = [[m.peer for m in plan.messages_out(rank, message_bytes)] for rank in range(plan.sender.num_ranks)]
    receives = [[m.peer for m in plan.messages_in(rank, message_bytes)] for rank in range(plan.receiver.num_ranks)]
    while any(sends):
        ready = [(s, queue[0]) for s, queue in enumerate(sends) if queue and receives[queue[0]][0] == s]
        assert ready, f"nobody can go on: {sends} {receives}"
        for sender, receiver in ready:
            sends[sender].pop(0)
            receives[receiver].pop(0)
    assert not any(receives)


@pytest.mark.parametrize("message_bytes", [32, 1 << 20])
def test_ranks_that_send_to_several_servers_one_by_one_never_wait_in_a_circle(message_bytes):
    """Servers of different layouts, each with its own plan; a rank reaches only its next message to any of them."""
    model = Model(num_experts=4)
    sender = MegatronSharding(model.trainer_table(), world_size=8, tp=2, pp=2, ep=2, etp=1)
    sizes = [2, 4, 2]
    plans = [Plan(sender, ServerSharding(model.server_table(), tp=tp, ep=2), min_cut_bytes=64) for tp in sizes]
    turns = [Turns(8, sum(sizes[:i])) for i in range(len(sizes))]
    sends = []
    for rank in range(8):
        places = [
            (turns[i].place(message, rank, message.peer), (i, message.peer))
            for i, plan in enumerate(plans)
            for message in plan.messages_out(rank, message_bytes, turns[i])
        ]
        assert len({place for place, _ in places}) == len(places), "a rank has one message at a place"
        sends.append([receiver for _, receiver in sorted(places)])
    receives = {
        (i, rank): [message.peer for message in plan.messages_in(rank, message_bytes, turns[i])]
        for i, plan in enumerate(plans)
        for rank in range(sizes[i])
    }
    while any(sends):
        ready = [(s, queue[0]) for s, queue in enumerate(sends) if queue and receives[queue[0]][0] == s]
        assert ready, f"nobody can go on: {sends} {receives}"
        for rank, receiver in ready:
            sends[rank].pop(0)
            receives[receiver].pop(0)
    assert not any(receives.values())


@pytest.mark.parametrize(("num_senders", "num_receivers"), [(4, 4), (6, 3), (2, 5)])
def test_no_turn_is_wasted_where_everybody_has_something_for_everybody(num_senders, num_receivers):
    sender = ServerSharding((Rename("w", "w", (60, 60), 0),), tp=num_senders)
    plan = Plan(sender, ServerSharding((Rename("w", "w", (60, 60), 1),), tp=num_receivers))
    sends = [[m.peer for m in plan.messages_out(rank, 1 << 20)] for rank in range(num_senders)]
    receives = [[m.peer for m in plan.messages_in(rank, 1 << 20)] for rank in range(num_receivers)]
    turns = 0
    while any(sends):
        turns += 1
        for sender, receiver in [(s, q[0]) for s, q in enumerate(sends) if q and receives[q[0]][0] == s]:
            sends[sender].pop(0)
            receives[receiver].pop(0)
    assert turns == max(num_senders, num_receivers)
