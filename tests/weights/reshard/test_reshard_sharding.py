import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from spread_tables import Model

from megarl.weights.mapping.names import Rename
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


def test_layers_are_dealt_to_stages_evenly_in_chunks_or_as_told():
    plain = MegatronSharding(DENSE, world_size=2, pp=2)
    chunks = MegatronSharding(DENSE, world_size=2, pp=2, vpp=2)
    uneven = MegatronSharding(DENSE, world_size=2, pp=2, layers_per_chunk=(1, 3))
    assert [layers_of(plain, rank) for rank in (0, 1)] == [[0, 1], [2, 3]]
    assert [layers_of(chunks, rank) for rank in (0, 1)] == [[0, 2], [1, 3]]
    assert [layers_of(uneven, rank) for rank in (0, 1)] == [[0], [1, 2, 3]]


@pytest.mark.parametrize(("pp", "vpp"), [(2, None), (2, 2), (2, 4), (4, None), (4, 2)])
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


def test_owned_and_holdings_agree():
    model = Model(num_experts=4)
    for sharding in (
        MegatronSharding(model.trainer_table(), world_size=16, tp=2, pp=2, ep=2, etp=1),
        ServerSharding(model.server_table(), tp=4, ep=2, num_replicas=2),
    ):
        holdings = sharding.holdings(sharding.tensors)
        for rank in range(sharding.num_ranks):
            theirs = {n: [(h.box, h.param_slice) for h in some if rank in h.ranks] for n, some in holdings.items()}
            assert sharding.owned(rank) == {name: some for name, some in theirs.items() if some}


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


def test_one_tensor_in_two_shapes_is_refused():
    table = (Rename("a", "same", (2,)), Rename("b", "same", (3,)))
    with pytest.raises(ValueError, match=r"same is bfloat16\[2\] and, by b, bfloat16\[3\]"):
        _ = ServerSharding(table).tensors
