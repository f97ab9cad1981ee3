"""Spreads of parameters over ranks: against Megatron's, what is checked before slices are sent, and their text."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from spread_tables import LatentModel, Model

from megarl.weights.mapping.names import GateUp, Rename, ValueHead
from megarl.weights.reshard.describe import fingerprint, from_json, to_json
from megarl.weights.reshard.exchange import Link, check_messages, check_params
from megarl.weights.reshard.plan import Plan
from megarl.weights.reshard.sharding import MegatronSharding, ServerSharding

DENSE = Model().trainer_table()
SIZES = st.sampled_from([1, 2, 4])


def position(groups, rank):
    """Of a rank in the group that has it."""
    return next(group.index(rank) for group in groups if rank in group)


@given(tp=SIZES, cp=SIZES, pp=SIZES, ep=SIZES, etp=SIZES, more=st.sampled_from([1, 2, 3]))
def test_ranks_are_numbered_as_megatron_numbers_them(tp, cp, pp, ep, etp, more):
    world = pp * max(tp * cp, 1) * ep * etp * more
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp, 1, world // (tp * cp * pp), pp, cp, order)
    experts = RankGenerator(etp, ep, world // (etp * ep * pp), pp, 1, order)
    groups = [dense.get_ranks("tp"), experts.get_ranks("ep"), experts.get_ranks("tp"), dense.get_ranks("pp")]
    sharding = MegatronSharding(DENSE, world_size=world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
    for rank in range(world):
        coordinate = sharding.coordinate(rank)
        ours = [coordinate.tp_rank, coordinate.ep_rank, coordinate.etp_rank, sharding.stage(rank)]
        assert ours == [position(group, rank) for group in groups]
        assert (coordinate.tp, coordinate.ep, coordinate.etp) == (tp, ep, etp)


def layers_of(sharding, rank):
    return sorted({op.layer for op in sharding.table if op.layer is not None and op.param in sharding.shapes(rank)})


def test_layers_are_dealt_to_stages_as_told():
    uneven = MegatronSharding(DENSE, world_size=2, pp=2, layers_per_chunk=(1, 3))
    assert [layers_of(uneven, rank) for rank in (0, 1)] == [[0], [1, 2, 3]]


@pytest.mark.parametrize(("pp", "vpp"), [(2, None), (2, 4), (4, None), (4, 2)])
def test_layers_lie_on_the_stages_and_in_the_chunks_where_megatron_puts_them(pp, vpp):
    table, chunks = Model(num_layers=8).trainer_table(), vpp or 1
    config = TransformerConfig(
        num_layers=8,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        pipeline_dtype=torch.float32,
    )
    sharding = MegatronSharding(table, world_size=pp, pp=pp, vpp=chunks)
    for rank in range(pp):
        firsts = [get_transformer_layer_offset(config, chunk if vpp else None, rank) for chunk in range(chunks)]
        assert layers_of(sharding, rank) == [first + i for first in firsts for i in range(8 // (pp * chunks))]


def test_the_ends_of_the_model_are_on_the_first_and_the_last_stage():
    def ends(sharding, rank):
        return [name for name in sharding.shapes(rank) if "layers" not in name]

    untied = MegatronSharding(DENSE, world_size=2, pp=2)
    assert ends(untied, 0) == ["embedding.word_embeddings.weight"]
    assert ends(untied, 1) == ["decoder.final_layernorm.weight", "output_layer.weight"]
    table = Model(is_tied=True).trainer_table()
    tied = MegatronSharding(table, world_size=2, pp=2)
    assert ends(tied, 1) == ["output_layer.weight", "decoder.final_layernorm.weight"]
    alone = MegatronSharding(table)
    assert ends(alone, 0) == ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]


def test_a_server_deals_runs_of_experts_to_neighbouring_ranks():
    server = ServerSharding(Model(num_experts=4).server_table(), tp=4, ep=2, num_replicas=2)
    coordinates = [server.coordinate(rank) for rank in range(8)]
    assert [coordinate.tp_rank for coordinate in coordinates] == [0, 1, 2, 3] * 2
    assert [coordinate.ep_rank for coordinate in coordinates] == [0, 0, 1, 1] * 2
    assert [coordinate.etp_rank for coordinate in coordinates] == [0, 1, 0, 1] * 2
    held = list(server.holdings(["model.layers.1.mlp.experts.3.up_proj.weight"]).values())
    assert [(h.box, h.param_slice.index, h.param_slice.start, h.ranks) for h in held[0]] == [
        (((0, 4), (0, 8)), 1, (4, 0), (2, 6)),
        (((4, 8), (0, 8)), 1, (4, 0), (3, 7)),
    ]


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"world_size": 6, "tp": 4}, r"tp\*pp\*cp=4 does not divide world_size=6"),
        ({"world_size": 4, "ep": 3}, r"etp\*ep\*pp=3 does not divide world_size=4"),
        ({"world_size": 3, "pp": 3}, r"4 layers do not divide by pp\*vpp=3; expected layers_per_chunk"),
        ({"world_size": 2, "pp": 2, "layers_per_chunk": (2, 1)}, r"layers_per_chunk=\[2, 1\]: expected 2 numbers"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        MegatronSharding(DENSE, **sizes)
    with pytest.raises(ValueError, match="ep_size=2 does not divide its tp_size=3"):
        ServerSharding(DENSE, tp=3, ep=2)
    with pytest.raises(ValueError, match=r"same is bfloat16\[2\] and, by b, bfloat16\[3\]"):
        _ = ServerSharding((Rename("a", "same", (2,)), Rename("b", "same", (3,)))).tensors


SPREAD = ServerSharding((Rename("a", "a", (4, 2), 0), Rename("b", "b", (3,))), tp=2, dtypes=(("b", "float32"),))


def params(**changed):
    return {"a": torch.zeros(2, 2, dtype=torch.bfloat16), "b": torch.zeros(3)} | changed


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"c": torch.zeros(1)}, "unknown: c"),
        ({"b": torch.zeros(3, dtype=torch.bfloat16)}, r"different: b \(\(3,\), 'bfloat16'\) for \(\(3,\), 'float32'\)"),
        ({"a": torch.zeros(4, 2, dtype=torch.bfloat16)}, "different: a"),
    ],
)
def test_other_parameters_are_refused_with_their_names(changed, fault):
    check_params(SPREAD, 1, params())
    with pytest.raises(ValueError, match=rf"rank 1 does not hold the parameters of its description \({fault}"):
        check_params(SPREAD, 1, params(**changed))
    with pytest.raises(ValueError, match="missing: a, b"):
        check_params(SPREAD, 0, {})


def link(*ranks):
    return Link(None, dict.fromkeys(ranks, 0), torch.device("cpu"))


def test_a_receiver_wants_all_its_senders_in_the_group_and_all_its_bytes_in_their_messages():
    by_columns = ServerSharding((Rename("a", "a", (4, 2), 1), Rename("b", "b", (3,))), tp=2, dtypes=SPREAD.dtypes)
    plan = Plan(by_columns, SPREAD)
    messages = plan.messages_in(0, 64)
    assert plan.num_bytes(0) == 2 * 2 * 2 + 3 * 4
    assert {message.peer for message in messages} == {0, 1}
    check_messages(plan, 0, messages, link(0, 1))
    with pytest.raises(ValueError, match="rank 0 of the server needs slices of the trainer's ranks 1, which have not"):
        check_messages(plan, 0, messages, link(0))
    with pytest.raises(ValueError, match=r"rank 0 of the server is to be sent \d+ bytes, expected 20"):
        check_messages(plan, 0, messages[1:], link(0, 1))


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


def test_parameters_that_differ_in_numbers_share_a_pattern():
    small, large = (json.loads(to_json(ServerSharding(Model(num_layers=n).trainer_table()))) for n in (2, 40))
    assert small["patterns"] == large["patterns"]
    assert len(large["table"]) == 40 * 7 + 3


def test_all_kinds_of_mappings_are_read():
    table = (ValueHead("output_layer.weight", "score.weight", (1, 8)), *LatentModel().trainer_table()[:20])
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


OTHERS = {
    "tp": (replace(TRAINER, tp=1), SERVER),
    "cp": (replace(TRAINER, cp=2), SERVER),
    "ep": (replace(TRAINER, ep=1), SERVER),
    "type": (replace(TRAINER, dtype="float32"), SERVER),
    "up over gate": (replace(TRAINER, table=swapped(TRAINER.table)), SERVER),
    "order of tensors": (replace(TRAINER, table=TRAINER.table[1:] + TRAINER.table[:1]), SERVER),
    "replicas": (TRAINER, replace(SERVER, num_replicas=2)),
    "type of one tensor": (TRAINER, replace(SERVER, dtypes=())),
    "direction": (SERVER, TRAINER),
}


def test_every_difference_changes_the_fingerprint():
    found = {name: fingerprint(*ends) for name, ends in OTHERS.items()} | {"none": fingerprint(TRAINER, SERVER)}
    assert len(set(found.values())) == len(found), found
    assert {len(digest) for digest in found.values()} == {64}
    plans = [Plan(TRAINER, SERVER), Plan(TRAINER, SERVER, min_cut_bytes=64)]
    assert len({plan.fingerprint(size) for plan in plans for size in (64, 128)}) == 4


def test_mappings_that_cut_in_other_ways_are_told_apart_by_their_slices(monkeypatch):
    before = fingerprint(TRAINER, SERVER)
    pieces = GateUp.pieces
    monkeypatch.setattr(GateUp, "pieces", lambda self, rank, size: pieces(self, size - 1 - rank, size))
    assert fingerprint(TRAINER, SERVER) != before


def test_a_process_that_only_receives_knows_every_kind_of_mapping_and_loads_no_megatron():
    """Inside a server nothing imports the tables for it."""
    script = "import megarl.weights.push.receiver, sys; from megarl.weights.reshard.describe import from_json\n"
    script += "for line in sys.stdin: from_json(line)\n"
    script += "import megarl.weights.mapping.families; print([m for m in sys.modules if m.startswith('megatron')])"
    command, lines = [sys.executable, "-W", "ignore", "-c", script], f"{to_json(TRAINER)}\n{to_json(SERVER)}\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
