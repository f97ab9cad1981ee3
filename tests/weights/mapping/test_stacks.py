"""gpt-oss: a layer's table by hand, and the stacks that its folders have in place of single experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.weights.mapping.families import stacks_for, table_for
from megarl.weights.mapping.server_map import server_table
from megarl.weights.mapping.stacks import Stack, joined, joined_sizes

CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_local_experts": 2,
    "attention_bias": True,
    "vocab_size": 21,
    "tie_word_embeddings": False,
}
LAYER = "model.layers.0."


def outside() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the folder's tensors."""
    single = {name: (shape, None) for op in table_for(CONFIG) for name, shape in op.hf_shapes.items()}
    return {name: shape for name, (shape, _) in joined_sizes(single, stacks_for(CONFIG)).items()}


def test_a_layer_by_hand() -> None:
    assert {name.removeprefix(LAYER): shape for name, shape in outside().items() if name.startswith(LAYER)} == {
        "input_layernorm.weight": (8,),
        "post_attention_layernorm.weight": (8,),
        "self_attn.q_proj.weight": (16, 8),
        "self_attn.k_proj.weight": (8, 8),
        "self_attn.v_proj.weight": (8, 8),
        "self_attn.q_proj.bias": (16,),
        "self_attn.k_proj.bias": (8,),
        "self_attn.v_proj.bias": (8,),
        "self_attn.o_proj.weight": (8, 16),
        "self_attn.o_proj.bias": (8,),
        "self_attn.sinks": (4,),
        "mlp.router.weight": (2, 8),
        "mlp.router.bias": (2,),
        "mlp.experts.gate_up_proj": (2, 8, 12),
        "mlp.experts.gate_up_proj_bias": (2, 12),
        "mlp.experts.down_proj": (2, 6, 8),
        "mlp.experts.down_proj_bias": (2, 8),
    }


def test_an_expert_in_the_table() -> None:
    own = {op.param: op for op in table_for(CONFIG) if ".local_experts.1." in op.param}
    start = "decoder.layers.0.mlp.experts.local_experts.1."
    assert {name.removeprefix(start): op.shard_shape(1) for name, op in own.items()} == {
        "linear_fc1.weight": (12, 8),
        "linear_fc1.bias": (12,),
        "linear_fc2.weight": (8, 6),
        "linear_fc2.bias": (8,),
    }
    assert all(op.expert == (1, 2) for op in own.values())


def test_a_ranks_sinks_are_those_of_its_heads() -> None:
    (sinks,) = [op for op in table_for(CONFIG) if op.param.endswith("softmax_offset")]
    assert sinks.shard_shape(2) == (2,)
    assert sinks.pieces(1, 2)[0].hf_start == 2


def test_rows_of_gate_and_up_alternate_in_the_columns_of_a_stack() -> None:
    stack = Stack("s", 2, ("{}.gate", "{}.up"), (2, 3))
    gate, up = torch.arange(6.0).view(2, 3), torch.arange(10.0, 16.0).view(2, 3)
    stream = [("before", torch.zeros(1)), ("0.gate", -gate), ("0.up", -up), ("1.gate", gate), ("1.up", up)]
    found = dict(joined(stream, [stack]))
    assert list(found) == ["before", "s"]
    assert found["s"].shape == stack.shape == (2, 3, 4)
    assert found["s"][1].tolist() == [[0, 10, 3, 13], [1, 11, 4, 14], [2, 12, 5, 15]]
    assert torch.equal(stack.part_of(found["s"][0], 1), -up)


def test_biases_alternate_too() -> None:
    stack = Stack("s", 1, ("{}.gate", "{}.up"), (3,))
    found = dict(joined([("0.gate", torch.tensor([1, 2, 3])), ("0.up", torch.tensor([4, 5, 6]))], [stack]))
    assert found["s"].tolist() == [[1, 4, 2, 5, 3, 6]]


def test_a_stream_that_lacks_a_part_is_an_error() -> None:
    with pytest.raises(AssertionError, match="parts of s never came"):
        list(joined([("0.gate", torch.zeros(3))], [Stack("s", 1, ("{}.gate", "{}.up"), (3,))]))


def test_servers_are_told_by_the_names_of_the_folder() -> None:
    for engine in ("hf", "sglang"):
        assert {op.param: op.shard_shape(1) for op in server_table(engine, CONFIG)} == outside()  # type: ignore[arg-type]


def test_other_families_have_no_stacks() -> None:
    assert stacks_for({"model_type": "qwen3_moe"}) == stacks_for({}) == []
