"""10^12 parameters from 1,024 ranks to 256: a rank derives its own transfers alone, and they are the right ones."""

from math import prod

import pytest
from spread_tables import LatentModel

from megarl.weights.reshard.describe import from_json, to_json
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import MegatronSharding, ServerSharding

pytestmark = pytest.mark.full

MODEL = LatentModel()
MESSAGE_BYTES = 32 << 20


@pytest.fixture(scope="module")
def plan():
    trainer = MegatronSharding(
        MODEL.trainer_table(), world_size=1024, tp=8, pp=16, ep=64, etp=1, layers_per_chunk=(4,) * 15 + (1,)
    )
    server = ServerSharding(MODEL.server_table(), tp=32, ep=32, num_replicas=8)
    return Plan(trainer, server)


def test_a_server_rank_receives_its_own_shard_once_in_few_messages(plan):
    assert 1e12 < sum(prod(tensor.shape) for tensor in plan.sender.tensors.values()) < 1.05e12
    transfers = plan.receives(77)
    shapes = plan.receiver.shapes(77).values()
    num_bytes = sum(t.num_bytes for t in transfers)
    assert num_bytes == sum(2 * prod(shape) for shape, _ in shapes)
    assert len({(t.hf_name, t.box) for t in transfers}) == len(transfers) < 4_000
    messages = plan.messages_in(77, MESSAGE_BYTES)
    assert all(m.num_bytes <= MESSAGE_BYTES for m in messages)
    assert sum(part.num_bytes for m in messages for part in m.parts) == num_bytes
    assert len(messages) < 4_000


def test_a_trainer_rank_sends_its_experts_to_each_server(plan):
    """Rank 70 is number 6 of the second of 16 stages, and has 6 of 384 experts of its four layers."""
    transfers = plan.sends(70)
    expected = {
        f"model.layers.{layer}.mlp.experts.{expert}.{x}_proj.weight"
        for layer in range(4, 8)
        for expert in range(36, 42)
        for x in ("gate", "up", "down")
    }
    experts = [t for t in transfers if ".experts." in t.hf_name]
    assert {t.hf_name for t in experts} == expected
    assert len(experts) == 8 * len(expected)
    assert len(transfers) < 1_000


def test_the_description_is_small(plan):
    text = to_json(plan.sender)
    assert len(text) < 3_000_000
    assert from_json(text) == plan.sender
