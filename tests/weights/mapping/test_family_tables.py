import subprocess
import sys

import pytest

from megarl.layout import padded_vocab_size
from megarl.weights import FAMILIES, table_for
from megarl.weights.mapping.names import Piece, ShardCoordinate, Vocab

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 12,
    "vocab_size": 21,
    "tie_word_embeddings": False,
}


def hf_shapes(config: dict, **kwargs: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for op in table_for(config, **kwargs) for name, shape in op.hf_shapes.items()}


def test_qwen3_layer_by_hand() -> None:
    shapes = hf_shapes(CONFIG)
    layer = {n.removeprefix("model.layers.1."): s for n, s in shapes.items() if n.startswith("model.layers.1.")}
    assert layer == {
        "input_layernorm.weight": (8,),
        "self_attn.q_proj.weight": (16, 8),
        "self_attn.k_proj.weight": (8, 8),
        "self_attn.v_proj.weight": (8, 8),
        "self_attn.q_norm.weight": (4,),
        "self_attn.k_norm.weight": (4,),
        "self_attn.o_proj.weight": (8, 16),
        "post_attention_layernorm.weight": (8,),
        "mlp.gate_proj.weight": (12, 8),
        "mlp.up_proj.weight": (12, 8),
        "mlp.down_proj.weight": (8, 12),
    }
    rest = [n for n in shapes if ".layers." not in n]
    assert rest == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]


def test_qwen2_has_biases_and_no_norms_on_q_and_k() -> None:
    shapes = hf_shapes(CONFIG | {"model_type": "qwen2"})
    assert shapes["model.layers.0.self_attn.q_proj.bias"] == (16,)
    assert shapes["model.layers.0.self_attn.k_proj.bias"] == (8,)
    assert not [n for n in shapes if n.endswith(("q_norm.weight", "o_proj.bias"))]


def test_llama_and_mistral_have_neither() -> None:
    for family in ("llama", "mistral"):
        shapes = hf_shapes(CONFIG | {"model_type": family, "head_dim": None})
        assert shapes["model.layers.0.self_attn.q_proj.weight"] == (8, 8), "hidden_size / num_attention_heads a head"
        assert not [n for n in shapes if n.endswith(("q_norm.weight", ".bias"))]


QWEN3_MOE = CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "moe_intermediate_size": 6,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}


def test_qwen3_moe_layers_by_hand() -> None:
    shapes = hf_shapes(QWEN3_MOE)
    start = "model.layers.1.mlp."
    assert {n.removeprefix(start): s for n, s in shapes.items() if n.startswith(start)} == {
        "gate.weight": (4, 8),
        **{f"experts.{i}.{name}.weight": (6, 8) for i in range(4) for name in ("gate_proj", "up_proj")},
        **{f"experts.{i}.down_proj.weight": (8, 6) for i in range(4)},
    }
    dense = [n for n in shapes if n.startswith("model.layers.0.mlp.")]
    assert [n.rpartition("mlp.")[2] for n in dense] == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    every_second = hf_shapes(QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": []})
    assert every_second == shapes, "layers 1, 3, ... have experts"


def test_transformers_5_writes_the_number_of_experts_under_another_name() -> None:
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in QWEN3_MOE.items()}
    assert hf_shapes(renamed) == hf_shapes(QWEN3_MOE)


def test_mixtral_experts_by_hand() -> None:
    config = CONFIG | {"model_type": "mixtral", "num_local_experts": 2}
    shapes = hf_shapes(config)
    start = "model.layers.0.block_sparse_moe."
    assert {n.removeprefix(start): s for n, s in shapes.items() if n.startswith(start)} == {
        "gate.weight": (2, 8),
        **{f"experts.{i}.{name}.weight": (12, 8) for i in range(2) for name in ("w1", "w3")},
        **{f"experts.{i}.w2.weight": (8, 12) for i in range(2)},
    }
    (gate_up,) = [
        op for op in table_for(config) if op.param.endswith("layers.1.mlp.experts.local_experts.1.linear_fc1.weight")
    ]
    assert [p.hf_name[-9:] for p in gate_up.pieces(0, 1)] == ["w1.weight", "w3.weight"], "w1 is the gate, w3 is up"


def test_experts_are_dealt_to_expert_ranks_and_cut_over_their_own_axis() -> None:
    own = {op.param: op for op in table_for(QWEN3_MOE)}
    third = own["decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"]
    assert (third.axis, third.expert) == ("etp", (2, 4))
    coordinate = ShardCoordinate(tp_rank=1, tp=4, ep_rank=1, ep=2, etp_rank=1, etp=2)
    assert third.held_by(coordinate)
    assert not third.held_by(ShardCoordinate(ep_rank=0, ep=2))
    assert third.shape_at(coordinate) == (6, 8), "3 of 6 rows of gate over 3 of 6 rows of up"
    assert third.pieces_at(coordinate)[0] == Piece("model.layers.1.mlp.experts.2.gate_proj.weight", 0, 3, 0, 3)
    router = own["decoder.layers.1.mlp.router.weight"]
    assert (router.is_sharded, router.axis, router.expert) == (False, "tp", None)
    with pytest.raises(ValueError, match=r"4 experts do not divide by expert_model_parallel_size=3"):
        third.held_by(ShardCoordinate(ep=3))


def test_shard_shapes_at_two_ranks_by_hand() -> None:
    table = {op.param: op.shard_shape(2) for op in table_for(CONFIG)}
    assert table["embedding.word_embeddings.weight"] == (16, 8)  # 21 rows padded to 32
    assert table["decoder.layers.0.self_attention.linear_qkv.weight"] == (16, 8)
    assert table["decoder.layers.0.self_attention.linear_proj.weight"] == (8, 8)
    assert table["decoder.layers.0.mlp.linear_fc1.weight"] == (12, 8)
    assert table["decoder.layers.0.mlp.linear_fc2.weight"] == (8, 6)
    assert table["decoder.final_layernorm.weight"] == (8,)


def test_tied_embeddings_have_one_entry_and_a_copy_on_the_last_stage() -> None:
    table = table_for(CONFIG | {"tie_word_embeddings": True})
    assert "output_layer.weight" not in [op.param for op in table]
    assert table[0].copies == ("output_layer.weight",)
    assert not [op for op in table_for(CONFIG) if op.copies]


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_has_a_value_head_and_no_output_rows(tied: bool) -> None:
    table = table_for(CONFIG | {"tie_word_embeddings": tied}, role="critic")
    assert list(table[-1].hf_shapes.items()) == [("score.weight", (1, 8))]
    assert not table[-1].required
    assert [op.param for op in table if op.copies] == []
    assert "lm_head.weight" not in hf_shapes(CONFIG, role="critic")


def test_vocabulary_padding_is_that_of_the_models() -> None:
    for size in (1, 15, 16, 17, 128, 151936):
        for tp in (1, 2, 4):
            (op,) = [op for op in table_for(CONFIG | {"vocab_size": size}) if op.param.startswith("embedding")]
            assert isinstance(op, Vocab)
            assert op.shard_shape(tp)[0] * tp == padded_vocab_size(size, tp)


def test_an_unknown_family_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"model_type='gpt2' has no table.*qwen2, qwen3"):
        table_for(CONFIG | {"model_type": "gpt2"})
    assert {"qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "mixtral"} <= set(FAMILIES)


def test_attention_bias_that_the_family_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention_bias=True is not supported for model_type='qwen3'"):
        table_for(CONFIG | {"attention_bias": True})


def test_tables_load_no_megatron() -> None:
    code = "import sys, megarl.weights.mapping.families; print([m for m in sys.modules if m.startswith('megatron')])"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
