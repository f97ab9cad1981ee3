"""Plans against tensors that are cut by hand, of made-up models and of every family; regions, messages and turns."""

from collections import Counter
from typing import Any

import pytest
import torch
from hf_configs import hf_of as config_of
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_reference import UNTOUCHED, by_peer, carry_out, cut_by_hand, whole_tensors
from spread_tables import Model
from tiny_models import FAMILIES

from megarl.arch.boxes import box_size, contains, cut, intersect, refine
from megarl.arch.sglang_config import UNKNOWN
from megarl.weights.mapping.families import stacks_for, table_for
from megarl.weights.mapping.names import Rename
from megarl.weights.mapping.server_map import EngineKind, server_table
from megarl.weights.reshard.describe import from_json, to_json
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import MegatronSharding, ServerSharding
from megarl.weights.reshard.transfers import ALIGNMENT, MessageSchedule, pack

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


@settings(max_examples=30)
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


@pytest.mark.parametrize("num_replicas", [1, 4, 6])
def test_replicas_share_the_sending(num_replicas):
    """Two tensor-parallel ranks in four replicas: whatever the number of servers, no sender has 5% above the mean."""
    model = Model(num_layers=16, hidden=64, num_heads=8, head_dim=8, ffn=256, vocab_size=640)
    sender = MegatronSharding(model.trainer_table(), world_size=8, tp=2)
    receiver = ServerSharding(model.server_table(), tp=2, num_replicas=num_replicas)
    plan = Plan(sender, receiver, min_cut_bytes=2048)
    loads = bytes_of_senders(plan)
    received = sum(t.num_bytes for rank in range(receiver.num_ranks) for t in plan.receives(rank))
    assert sum(loads) == received
    assert max(loads) <= 1.05 * sum(loads) / len(loads)


def test_small_tensors_go_whole_and_from_many_senders():
    table = tuple(Rename(f"p{i}", f"p{i}", (16,)) for i in range(200))
    plan = Plan(MegatronSharding(table, world_size=4), ServerSharding(table))
    transfers = plan.receives(0)
    assert [(t.hf_name, t.box) for t in transfers] == [(f"p{i}", ((0, 16),)) for i in range(200)]
    assert all(30 <= count <= 70 for count in Counter(t.peer for t in transfers).values())


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


@pytest.mark.parametrize("message_bytes", [16, 100, 1 << 20])
def test_messages_are_bounded_and_hold_every_transfer_once(message_bytes):
    model = Model(num_experts=4)
    sender = MegatronSharding(model.trainer_table(), world_size=8, tp=2, pp=2, ep=2, etp=1)
    plan = Plan(sender, ServerSharding(model.server_table(), tp=2, ep=2, num_replicas=3), min_cut_bytes=64)
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


def turns_until_all_passed(sends: list[list[Any]], receives: dict[Any, list[int]]) -> int:
    """Both ends must reach a message before it passes, and each rank reaches only its next one."""
    turns = 0
    while any(sends):
        ready = [(s, queue[0]) for s, queue in enumerate(sends) if queue and receives[queue[0]][0] == s]
        assert ready, f"nobody can go on: {sends} {receives}"
        for sender, receiver in ready:
            sends[sender].pop(0)
            receives[receiver].pop(0)
        turns += 1
    assert not any(receives.values())
    return turns


@pytest.mark.parametrize("message_bytes", [32, 1 << 20])
@pytest.mark.parametrize("servers", [[(2, 3)], [(2, 1), (4, 1), (2, 1)]], ids=["replicas", "other layouts"])
def test_ranks_that_take_messages_one_by_one_never_wait_in_a_circle(servers, message_bytes):
    """Servers (tp, replicas), each with its own plan; a rank reaches only its next message to any of them."""
    model = Model(num_experts=4)
    sender = MegatronSharding(model.trainer_table(), world_size=8, tp=2, pp=2, ep=2, etp=1)
    receivers = [ServerSharding(model.server_table(), tp=tp, ep=2, num_replicas=count) for tp, count in servers]
    plans = [Plan(sender, receiver, min_cut_bytes=64) for receiver in receivers]
    turns = [MessageSchedule(8, sum(receiver.num_ranks for receiver in receivers[:i])) for i in range(len(plans))]
    sends = []
    for rank in range(8):
        places = [
            (turns[i].place(message, rank, message.peer), (i, message.peer))
            for i, plan in enumerate(plans)
            for message in plan.messages_out(rank, message_bytes)
        ]
        assert len({place for place, _ in places}) == len(places), "a rank has one message at a place"
        sends.append([receiver for _, receiver in sorted(places)])
    receives = {
        (i, rank): [
            message.peer
            for message in sorted(
                plan.messages_in(rank, message_bytes),
                key=lambda message, i=i, rank=rank: turns[i].place(message, message.peer, rank),
            )
        ]
        for i, plan in enumerate(plans)
        for rank in range(plan.receiver.num_ranks)
    }
    turns_until_all_passed(sends, receives)


@pytest.mark.parametrize(("num_senders", "num_receivers"), [(4, 4), (6, 3), (2, 5)])
def test_no_turn_is_wasted_where_everybody_has_something_for_everybody(num_senders, num_receivers):
    sender = ServerSharding((Rename("w", "w", (60, 60), 0),), tp=num_senders)
    plan = Plan(sender, ServerSharding((Rename("w", "w", (60, 60), 1),), tp=num_receivers))
    sends = [[m.peer for m in plan.messages_out(rank, 1 << 20)] for rank in range(num_senders)]
    receives = {rank: [m.peer for m in plan.messages_in(rank, 1 << 20)] for rank in range(num_receivers)}
    assert turns_until_all_passed(sends, receives) == max(num_senders, num_receivers)


# regions


sides = st.tuples(st.integers(0, 6), st.integers(1, 6)).map(lambda s: (s[0], s[0] + s[1]))
boxes = st.tuples(sides, sides)


def points(box):
    return {(i, j) for i in range(*box[0]) for j in range(*box[1])}


def test_rows_meet_columns_in_a_rectangle():
    assert intersect(((2, 4), (0, 8)), ((0, 9), (5, 8))) == ((2, 4), (5, 8))
    assert intersect(((0, 4),), ((4, 8),)) is None


def test_boxes_that_tile_a_tensor_stay_whole():
    tiles = tuple(((i, i + 2), (0, 5)) for i in range(0, 8, 2))
    assert refine(tiles) == {tile: [tile] for tile in tiles}


@given(st.lists(boxes, min_size=1, max_size=5))
def test_cells_make_up_their_boxes_and_are_equal_or_apart(some):
    cells = refine(tuple(some))
    for box in some:
        assert set.union(*(points(cell) for cell in cells[box])) == points(box)
        assert sum(box_size(cell) for cell in cells[box]) == box_size(box)
    everywhere = {cell for of_box in cells.values() for cell in of_box}
    assert all(a == b or intersect(a, b) is None for a in everywhere for b in everywhere)


@given(boxes, st.integers(1, 20))
def test_parts_are_small_enough_and_in_row_major_order(box, at_most):
    parts = list(cut(box, at_most))
    assert all(box_size(part) <= at_most and contains(box, part) for part in parts)
    assert [point for part in parts for point in sorted(points(part))] == sorted(points(box))


def test_whole_rows_are_kept_together_where_they_fit():
    assert list(cut(((0, 5), (0, 4)), 8)) == [((0, 2), (0, 4)), ((2, 4), (0, 4)), ((4, 5), (0, 4))]
    assert list(cut(((0, 1), (0, 4)), 3)) == [((0, 1), (0, 3)), ((0, 1), (3, 4))]


# every family's own tables, the trainer's and the server's, through descriptions as text


CONFIGS = {family: config_of(family, num_hidden_layers=2, tie_word_embeddings=family == "qwen3") for family in FAMILIES}
SLICED = [family for family in FAMILIES if not stacks_for(CONFIGS[family])]  # stacks of experts are never sent so


@pytest.mark.parametrize(
    ("family", "engine"),
    [
        (family, engine)
        for family in SLICED
        for engine in ("hf", "sglang")
        if engine == "hf" or not family.startswith(UNKNOWN)
    ],
)
def test_a_familys_weights_arrive(family: str, engine: EngineKind) -> None:
    config = CONFIGS[family]
    trainer = MegatronSharding(tuple(table_for(config)), world_size=8, tp=2, pp=2, ep=2, etp=1, dtype="float32")
    server = ServerSharding(tuple(server_table(engine, config)), tp=2, ep=2, num_replicas=2, dtype="float32")
    plan = Plan(from_json(to_json(trainer)), from_json(to_json(server)), min_cut_bytes=128)
    whole = whole_tensors(trainer)
    for rank, held in enumerate(carry_out(plan, whole)):
        expected = cut_by_hand(server, rank, whole, padding=UNTOUCHED)
        assert held.keys() == expected.keys()
        assert all(torch.equal(held[name], expected[name]) for name in expected)
