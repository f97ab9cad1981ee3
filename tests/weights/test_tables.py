import subprocess
import sys

import pytest

from megarl.mcore.model import padded_vocab_size
from megarl.weights import FAMILIES, table_for
from megarl.weights.names import Vocab

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


def test_shard_shapes_at_two_ranks_by_hand() -> None:
    table = {op.megatron: op.shard_shape(2) for op in table_for(CONFIG)}
    assert table["embedding.word_embeddings.weight"] == (16, 8)  # 21 rows padded to 32
    assert table["decoder.layers.0.self_attention.linear_qkv.weight"] == (16, 8)
    assert table["decoder.layers.0.self_attention.linear_proj.weight"] == (8, 8)
    assert table["decoder.layers.0.mlp.linear_fc1.weight"] == (12, 8)
    assert table["decoder.layers.0.mlp.linear_fc2.weight"] == (8, 6)
    assert table["decoder.final_layernorm.weight"] == (8,)


def test_tied_embeddings_have_one_entry_and_a_copy_on_the_last_stage() -> None:
    table = table_for(CONFIG | {"tie_word_embeddings": True})
    assert "output_layer.weight" not in [op.megatron for op in table]
    assert table[0].copies == ("output_layer.weight",)
    assert not [op for op in table_for(CONFIG) if op.copies]


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_has_a_value_head_and_no_output_rows(tied: bool) -> None:
    table = table_for(CONFIG | {"tie_word_embeddings": tied}, role="critic")
    assert list(table[-1].hf_shapes.items()) == [("score.weight", (1, 8))]
    assert not table[-1].required
    assert [op.megatron for op in table if op.copies] == []
    assert "lm_head.weight" not in hf_shapes(CONFIG, role="critic")


def test_vocabulary_padding_is_that_of_the_models() -> None:
    for size in (1, 15, 16, 17, 128, 151936):
        for tp in (1, 2, 4):
            (op,) = [op for op in table_for(CONFIG | {"vocab_size": size}) if op.megatron.startswith("embedding")]
            assert isinstance(op, Vocab)
            assert op.shard_shape(tp)[0] * tp == padded_vocab_size(size, tp)


def test_an_unknown_family_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"model_type='gpt2' has no table.*qwen2, qwen3"):
        table_for(CONFIG | {"model_type": "gpt2"})
    assert set(FAMILIES) == {"qwen2", "qwen3"}


def test_attention_bias_that_the_family_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention_bias=True is not supported for model_type='qwen3'"):
        table_for(CONFIG | {"attention_bias": True})


def test_tables_load_no_megatron() -> None:
    code = "import sys, megarl.weights.tables; print([m for m in sys.modules if m.startswith('megatron')])"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
