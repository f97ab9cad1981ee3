"""Tables of the families: names and shapes against folders of transformers, and what a rank holds, by hand."""

import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from hf_configs import hf_of as config_of

from megarl.arch.hf_config import completed
from megarl.arch.layout import padded_vocab_size
from megarl.arch.mtp import TRAINED_MTP, with_mtp
from megarl.weights.hf.named import check_names, open_for
from megarl.weights.mapping.families import FAMILIES, LAYERS_OF_FURTHER_TOKENS, ignorable, table_for
from megarl.weights.mapping.names import Op, Piece, ShardCoordinate, Vocab
from megarl.weights.mapping.server_map import server_table
from megarl.weights.verify.digests import RankDigests, digest

QWEN3 = config_of("qwen3", hidden_size=8, num_hidden_layers=2, head_dim=4, intermediate_size=12, vocab_size=21)
SECOND = ShardCoordinate(tp_rank=1, tp=2, ep_rank=1, ep=2, etp_rank=0, etp=1)


def ops_of(config: dict[str, Any], **how: Any) -> dict[str, Op]:
    return {op.param: op for op in table_for(config, **how)}


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in tiny_models.FAMILIES),
    ("qwen3", {"tied": True}),
    ("llama2", {"head_dim": None}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    ("glm4_moe", {"attention_bias": False}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_a_table_names_what_transformers_writes(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """No tensor more and none less, each of the same shape; the HF server holds the same ones."""
    tiny_models.tiny_model(family, **{"tied": False, "num_hidden_layers": 2} | changes).save_pretrained(tmp_path)
    config = completed(tiny_models.read_config(tmp_path) | {"model_type": config_of(family)["model_type"]})
    with open_for(tmp_path, config) as folder:
        check_names(folder, table_for(config), ())
        held = getattr(folder, "hub_shapes", folder.shapes)
    assert {op.param: op.shape_at(ShardCoordinate()) for op in server_table("hf", config)} == held


def test_every_family_has_a_model_of_transformers() -> None:
    assert {config_of(family)["model_type"] for family in tiny_models.FAMILIES} == set(FAMILIES) - set(
        tiny_models.LACKING
    )


def test_the_number_of_experts_has_two_names() -> None:
    """transformers 5 writes another one than the hub has."""
    config = config_of("qwen3_moe")
    count = config.pop("num_experts", None) or config.pop("num_local_experts")
    assert table_for(config | {"num_experts": count}) == table_for(config | {"num_local_experts": count})


def test_experts_are_dealt_to_expert_ranks_and_cut_over_their_own_axis() -> None:
    own = ops_of(config_of("qwen3_moe", num_experts=4, moe_intermediate_size=6, mlp_only_layers=[]))
    third = own["decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"]
    assert (third.axis, third.expert) == ("etp", (2, 4))
    coordinate = ShardCoordinate(tp_rank=1, tp=4, ep_rank=1, ep=2, etp_rank=1, etp=2)
    assert third.held_by(coordinate)
    assert not third.held_by(ShardCoordinate(ep_rank=0, ep=2))
    assert third.shape_at(coordinate) == (6, 32), "3 of 6 rows of gate over 3 of 6 rows of up"
    assert third.pieces_at(coordinate)[0] == Piece("model.layers.1.mlp.experts.2.gate_proj.weight", 0, 3, 0, 3)
    router = own["decoder.layers.1.mlp.router.weight"]
    assert (router.is_sharded, router.axis, router.expert) == (False, "tp", None)
    with pytest.raises(ValueError, match=r"4 experts do not divide by expert_model_parallel_size=3"):
        third.held_by(ShardCoordinate(ep=3))


def test_the_gate_of_mixtral_is_w1_and_its_up_is_w3() -> None:
    gate_up = ops_of(config_of("mixtral"))["decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight"]
    assert [p.hf_name[-9:] for p in gate_up.pieces(0, 1)] == ["w1.weight", "w3.weight"]


@pytest.mark.parametrize(
    ("config", "held"),
    [
        (
            config_of("deepseek_v3", n_routed_experts=4),
            {
                "decoder.layers.1.self_attention.linear_q_down_proj.weight": (6, 32),
                "decoder.layers.1.self_attention.linear_kv_down_proj.weight": (12, 32),
                "decoder.layers.1.self_attention.linear_kv_up_proj.weight": (28, 20),
                "decoder.layers.1.self_attention.kv_layernorm.weight": (20,),
                "decoder.layers.1.mlp.router.expert_bias": (4,),
                "decoder.layers.1.mlp.shared_experts.linear_fc1.weight": (48, 32),
                "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight": (48, 32),  # cut over etp, here 1
            },
        ),
        (
            config_of("minimax_m2"),
            {
                "decoder.layers.1.self_attention.q_layernorm.weight": (32,),
                "decoder.layers.1.self_attention.k_layernorm.weight": (16,),
            },
        ),
        (config_of("gpt_oss"), {"decoder.layers.1.self_attention.core_attention.softmax_offset": (2,)}),
        *(
            (
                config_of(family),
                {
                    # Of 8 heads of 6 and 4 groups of 8 half: z 24, x 24, B 16, C 16, dt 4
                    "decoder.layers.0.self_attention.in_proj.weight": (84, 32),
                    "decoder.layers.0.self_attention.conv1d_weight": (56, 1, 3),
                    "decoder.layers.0.self_attention.conv1d_bias": (56,),
                    "decoder.layers.0.self_attention.norm.weight": (24,),
                    "decoder.layers.1.mlp.fc1_latent_proj.weight": (16, 32),
                    "decoder.layers.1.mlp.shared_experts.linear_fc1.weight": (20, 32),
                    "decoder.layers.1.mlp.experts.local_experts.4.linear_fc1.weight": (24, 16),
                    "decoder.layers.2.self_attention.linear_qkv.weight": (64, 32),
                    "decoder.layers.3.mlp.linear_fc2.weight": (32, 24),
                },
            )
            for family in ("nemotron_h_latent",)
            if family in tiny_models.FAMILIES
        ),
    ],
)
def test_shapes_on_the_second_of_two_ranks_by_hand(config: dict[str, Any], held: dict[str, tuple[int, ...]]) -> None:
    ops = ops_of(config)
    assert {name: ops[name].shape_at(SECOND) for name in held} == held


def test_what_belongs_to_heads_is_cut_with_them() -> None:
    """gpt-oss' sinks, a number for each head."""
    (sinks, *_) = [op for op in table_for(config_of("gpt_oss")) if op.param.endswith("softmax_offset")]
    assert sinks.pieces(1, 2)[0].hf_start == 2


def test_tied_embeddings_have_one_entry_and_a_copy_on_the_last_stage() -> None:
    table = table_for(QWEN3 | {"tie_word_embeddings": True})
    assert "output_layer.weight" not in [op.param for op in table]
    assert table[0].copies == ("output_layer.weight",)
    assert not [op for op in table_for(QWEN3) if op.copies]


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_has_a_value_head_and_no_output_rows(tied: bool) -> None:
    table = table_for(QWEN3 | {"tie_word_embeddings": tied}, role="critic")
    assert list(table[-1].hf_shapes.items()) == [("score.weight", (1, 8))]
    assert not table[-1].required
    assert [op.param for op in table if op.copies] == []
    assert not [op for op in table if "lm_head.weight" in op.hf_shapes]


def test_vocabulary_padding_is_that_of_the_models() -> None:
    for size in (1, 15, 16, 17, 128, 151936):
        for tp in (1, 2, 4):
            op = ops_of(QWEN3 | {"vocab_size": size})["embedding.word_embeddings.weight"]
            assert isinstance(op, Vocab)
            assert op.shard_shape(tp)[0] * tp == padded_vocab_size(size, tp)


@pytest.mark.parametrize(
    ("family", "count"),
    # Each of 3 layers with experts has one, each of 2 delta nets one, each of 3 mixers three beside 2 routers.
    [
        ("kimi_k2", 3),
        *(pair for pair in (("qwen3_5_text", 2), ("nemotron_h", 11)) if pair[0] not in tiny_models.LACKING),
    ],
)
def test_what_is_always_float32_stands_together(family: str, count: int) -> None:
    """So it is one bucket of float32 in a model of bfloat16."""
    runs = [(keeps, len(list(run))) for keeps, run in groupby(op.keeps_dtype for op in table_for(config_of(family)))]
    assert [keeps for keeps, _ in runs] == [False, True, False]
    assert runs[1] == (True, count)


@pytest.mark.parametrize("key", LAYERS_OF_FURTHER_TOKENS)
def test_layers_of_further_tokens_are_passed_over_as_far_as_config_json_counts_them(key: str) -> None:
    passed = ignorable(QWEN3 | {key: 2}, "actor")
    assert [n for n in range(8) if f"model.layers.{n}.eh_proj.weight" in passed] == [2, 3]
    assert "model.layers.2.eh_proj.weight" not in ignorable(QWEN3, "actor")


def test_mtp_layers_are_in_the_table_of_a_model_that_trains_them() -> None:
    """By hand; elsewhere they are passed over, and with them what they hold of the model again."""
    hf = config_of("deepseek_v3", num_hidden_layers=2, num_nextn_predict_layers=1)
    own, kept = with_mtp(hf, "joint"), "model.layers.2.enorm.weight"
    further = {op.param: [*op.hf_shapes.items()] for op in table_for(own) if op.param.startswith("mtp.")}
    assert further["mtp.layers.0.eh_proj.weight"] == [("model.layers.2.eh_proj.weight", (32, 64))]
    assert further["mtp.layers.0.final_layernorm.weight"] == [("model.layers.2.shared_head.norm.weight", (32,))]
    assert {name.split(".")[2] for shapes in further.values() for name, _ in shapes} == {"2"}
    in_block = {name.partition(".mtp_model_layer.")[2] for name in further} - {""}
    assert in_block == {op.param.split(".", 3)[3] for op in table_for(hf) if op.layer == 1}
    assert [op.layer for op in table_for(own) if op.param in further] == [None] * len(further)
    assert kept in ignorable(hf, "actor") and kept not in ignorable(own, "actor")
    assert "model.layers.2.shared_head.head.weight" in ignorable(own, "actor")
    assert [op.param for op in table_for(own | {TRAINED_MTP: ""})] == [op.param for op in table_for(hf)]


FLOAT32 = {"glm4_moe": "1.mlp.gate.weight", "minimax_m2": "1.block_sparse_moe.gate.weight"}
FLOAT32 |= dict.fromkeys(
    ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "0.linear_attn.A_log"
)  # the second layer is not linear
FLOAT32 |= dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "1.self_attn.indexer.k_norm.bias")


@pytest.mark.parametrize(
    "family",
    [kind for kind, family in FAMILIES.items() if family.float32_in_sglang and kind not in tiny_models.LACKING],
)
def test_sglang_holds_some_weights_in_float32_whatever_the_others_are(family: str) -> None:
    config = config_of(family, num_hidden_layers=2)
    table = [op for op in server_table("sglang", config) if op.own_dtype == "float32"]
    name = f"model.layers.{FLOAT32[family]}"
    assert [op.param for op in table][-1] == name
    assert all(op.param.endswith(FAMILIES[family].float32_in_sglang) for op in table)
    assert not [op for op in server_table("hf", config) if op.own_dtype]
    weight = torch.randn(table[-1].shape_at(ShardCoordinate())).bfloat16()
    held = RankDigests([table[-1]], ShardCoordinate(1, 2), {name: torch.bfloat16}, "sha256")
    held.add(name, weight)
    assert held.result() == {name: digest(weight.float())}


def test_what_has_no_table_is_refused() -> None:
    with pytest.raises(
        ValueError, match=f"model_type 'gpt2' is not supported; expected one of {re.escape(str(sorted(FAMILIES)))}"
    ):
        table_for(QWEN3 | {"model_type": "gpt2"})
