"""10^12 parameters from 1,024 ranks to 256: a rank derives its own transfers alone, and they are the right ones."""

from math import prod

import pytest
from plan_reference import by_peer
from spread_tables import LatentModel

from megarl.weights.reshard.describe import from_json, to_json
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import MegatronSharding, ServerSharding

MODEL = LatentModel()
MESSAGE_BYTES = 32 << 20


@pytest.fixture(scope="module")
def plan():
    trainer = MegatronSharding(
        MODEL.trainer_table(), world_size=1024, tp=8, pp=16, ep=64, etp=1, layers_per_chunk=(4,) * 15 + (1,)
    )
    server = ServerSharding(MODEL.server_table(), tp=32, ep=32, num_replicas=8)
    return Plan(trainer, server)


def num_params():
    m = MODEL
    heads = m.num_heads * (2 * m.nope + m.rope)
    attention = m.q_rank * (m.hidden + 1 + heads - m.num_heads * m.nope)
    attention += (m.kv_rank + m.rope) * m.hidden + m.kv_rank * (1 + m.num_heads * 2 * m.nope)
    attention += m.hidden * m.num_heads * m.nope + 2 * m.hidden
    sparse = 3 * m.hidden * m.expert_ffn * (m.num_experts + 1) + m.num_experts * (m.hidden + 1)
    layers = m.num_layers * attention + (m.num_layers - 1) * sparse + 3 * m.hidden * m.ffn
    return layers + 2 * m.vocab_size * m.hidden + m.hidden


def test_the_model_has_a_million_million_parameters(plan):
    assert sum(prod(tensor.shape) for tensor in plan.sender.tensors.values()) == num_params() > 1e12
    assert len(plan.sender.tensors) == len(plan.receiver.tensors) == 69_975


@pytest.mark.parametrize("rank", [0, 77, 255])
def test_a_server_rank_receives_its_own_shard_once(plan, rank):
    transfers = plan.receives(rank)
    shapes = plan.receiver.shapes(rank).values()
    assert sum(t.num_bytes for t in transfers) == sum(2 * prod(shape) for shape, _ in shapes)
    places = [(t.hf_name, t.box) for t in transfers]
    assert len(set(places)) == len(places)
    assert len(transfers) < 3_100
    assert all(len(t.param_slices) == 1 for t in transfers)


@pytest.mark.parametrize("rank", [0, 70, 1023])
def test_a_trainer_rank_sends_its_experts_to_each_server(plan, rank):
    transfers = plan.sends(rank)
    stage, coordinate = rank // 64, rank % 64
    layers = range(4 * stage, min(4 * stage + 4, 61))
    expected = {
        f"model.layers.{layer}.mlp.experts.{expert}.{x}_proj.weight"
        for layer in layers
        if layer > 0
        for expert in range(6 * coordinate, 6 * coordinate + 6)
        for x in ("gate", "up", "down")
    }
    experts = [t for t in transfers if ".experts." in t.hf_name]
    assert {t.hf_name for t in experts} == expected
    assert len(experts) == 8 * len(expected)
    assert len(transfers) < 1_000


def test_both_ends_of_a_pair_agree(plan):
    receives = by_peer(plan.receives(77))
    for sender in list(receives)[:: len(receives) // 4]:
        sends = [(t.hf_name, t.box) for t in plan.sends(sender) if t.peer == 77]
        assert sends == [(t.hf_name, t.box) for t in receives[sender]]


def test_ranks_of_a_stage_send_alike(plan):
    loads = [sum(t.num_bytes for t in plan.sends(rank)) for rank in range(128, 192, 7)]
    assert max(loads) < 1.02 * min(loads)


def test_messages_are_few(plan):
    messages = plan.messages_in(255, MESSAGE_BYTES)
    assert all(m.num_bytes <= MESSAGE_BYTES for m in messages)
    assert sum(part.num_bytes for m in messages for part in m.parts) == sum(t.num_bytes for t in plan.receives(255))
    assert len(messages) < 3_000


def test_the_description_is_small(plan):
    text = to_json(plan.sender)
    assert len(text) < 3_000_000
    assert from_json(text) == plan.sender
