import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spread_tables import LatentModel, Model

from megarl.weights.mapping.names import GateUp, Rename, ValueHead
from megarl.weights.reshard.describe import fingerprint, from_json, to_json
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import MegatronSharding, ServerSharding

MODEL = Model(num_experts=4)
TRAINER = MegatronSharding(MODEL.trainer_table(), world_size=8, tp=2, pp=2, ep=2, etp=1)
SERVER = ServerSharding(MODEL.server_table(), tp=2, ep=2, dtypes=(("model.norm.weight", "float32"),))


@settings(max_examples=25)
@given(
    st.builds(Model, num_layers=st.sampled_from([2, 12]), num_experts=st.sampled_from([0, 16]), is_tied=st.booleans()),
    st.sampled_from([1, 2]),
)
def test_a_spread_comes_back_equal(model, size):
    trainer = MegatronSharding(model.trainer_table(), world_size=4 * size, tp=size, pp=2, vpp=1, ep=size, etp=None)
    server = ServerSharding(model.server_table(), tp=size, ep=size, num_replicas=3, dtype="float16")
    assert from_json(to_json(trainer)) == trainer
    assert from_json(to_json(server)) == server


def test_what_comes_back_makes_the_same_plan():
    plan, again = Plan(TRAINER, SERVER), Plan(from_json(to_json(TRAINER)), from_json(to_json(SERVER)))
    assert again.receives(1) == plan.receives(1)
    assert again.fingerprint(64) == plan.fingerprint(64)


def test_parameters_that_differ_in_numbers_share_a_pattern():
    small, large = (json.loads(to_json(ServerSharding(Model(num_layers=n).trainer_table()))) for n in (2, 40))
    assert small["patterns"] == large["patterns"]
    assert len(large["table"]) == 40 * 6 + 3


def test_all_kinds_of_mappings_are_read():
    table = (ValueHead("output_layer.weight", "score.weight", (1, 8)), *LatentModel(num_layers=2).trainer_table()[:20])
    assert from_json(to_json(ServerSharding(table))) == ServerSharding(table)


def test_unknown_kinds_are_refused():
    text = to_json(ServerSharding((Rename("a", "a", (2,)),)))
    with pytest.raises(ValueError, match="described as Twist, which is not known; expected one of .*QKV"):
        from_json(text.replace("Rename", "Twist"))
    with pytest.raises(ValueError, match="layout='mesh' is not known; expected one of megatron, server"):
        from_json(text.replace('"server"', '"mesh"'))


def swapped(table):
    """The same names and shapes, but up over gate."""
    return tuple(replace(op, gate=op.up, up=op.gate) if isinstance(op, GateUp) else op for op in table)


@pytest.mark.parametrize(
    "other",
    [
        (replace(TRAINER, tp=1), SERVER),
        (replace(TRAINER, cp=2), SERVER),
        (replace(TRAINER, ep=1), SERVER),
        (replace(TRAINER, dtype="float32"), SERVER),
        (replace(TRAINER, table=swapped(TRAINER.table)), SERVER),
        (replace(TRAINER, table=TRAINER.table[1:] + TRAINER.table[:1]), SERVER),
        (TRAINER, replace(SERVER, num_replicas=2)),
        (TRAINER, replace(SERVER, dtypes=())),
        (SERVER, TRAINER),
    ],
)
def test_every_difference_changes_the_fingerprint(other):
    assert fingerprint(*other) != fingerprint(TRAINER, SERVER)
    assert len(fingerprint(*other)) == 64


def test_what_else_both_ends_must_agree_on_is_in_the_fingerprint():
    plans = [Plan(TRAINER, SERVER), Plan(TRAINER, SERVER, min_cut_bytes=64)]
    assert len({plan.fingerprint(size) for plan in plans for size in (64, 128)}) == 4


def test_mappings_that_cut_in_other_ways_are_told_apart_by_their_slices(monkeypatch):
    before = fingerprint(TRAINER, SERVER)
    pieces = GateUp.pieces
    monkeypatch.setattr(GateUp, "pieces", lambda self, rank, size: pieces(self, size - 1 - rank, size))
    assert fingerprint(TRAINER, SERVER) != before


def test_a_process_that_only_receives_knows_every_kind_of_mapping():
    """Inside a server nothing imports the tables for it."""
    script = "import megarl.weights.push.receiver, sys; from megarl.weights.reshard.describe import from_json; "
    script += "from_json(sys.stdin.read())"
    command = [sys.executable, "-W", "ignore", "-c", script]
    for sharding in (TRAINER, SERVER):
        done = subprocess.run(command, input=to_json(sharding), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
