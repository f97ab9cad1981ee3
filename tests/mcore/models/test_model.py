"""Megatron's config of a Hugging Face model, what is refused, and the value head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.layout import Layout
from megarl.mcore.models.layers import layers_per_chunk
from megarl.mcore.models.model import (
    CriticModel,
    ValueHead,
    build_model,
    check_layout,
    read_hf_config,
    transformer_config,
    unwrap,
)

pytestmark = pytest.mark.usefixtures("one_rank")

QWEN2: dict[str, Any] = {  # as transformers 4 wrote it
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "vocab_size": 45,
}
QWEN3: dict[str, Any] = {  # as transformers 5 writes it
    **{k: v for k, v in QWEN2.items() if not k.startswith("rope")},
    "model_type": "qwen3",
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "tie_word_embeddings": False,
}
MIXTRAL = {"model_type": "mixtral", "sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}


def test_qwen2_has_biases_and_qwen3_has_norms_and_its_own_head_dim() -> None:
    qwen2 = transformer_config(QWEN2, Layout(), torch.float32)
    assert (qwen2.num_layers, qwen2.hidden_size, qwen2.ffn_hidden_size) == (4, 32, 48)
    assert (qwen2.num_attention_heads, qwen2.num_query_groups, qwen2.kv_channels) == (4, 2, 8)
    assert (qwen2.add_qkv_bias, qwen2.qk_layernorm, qwen2.layernorm_epsilon) == (True, False, 1e-6)
    assert (qwen2.normalization, qwen2.gated_linear_unit, qwen2.activation_func) == ("RMSNorm", True, F.silu)
    qwen3 = transformer_config(QWEN3, Layout(), torch.bfloat16)
    assert (qwen3.add_qkv_bias, qwen3.qk_layernorm, qwen3.layernorm_epsilon) == (False, True, 1e-5)
    assert qwen3.kv_channels == 16, "not hidden_size / num_attention_heads"
    assert (qwen3.bf16, qwen3.params_dtype, qwen3.pipeline_dtype) == (True, torch.bfloat16, torch.bfloat16)


def test_the_config_is_one_for_packed_rl_training() -> None:
    config = transformer_config(QWEN3, Layout(tp=2, cp=2, sequence_parallel=True), torch.float32)
    assert config.calculate_per_token_loss
    assert config.variable_seq_lengths
    assert (config.hidden_dropout, config.attention_dropout) == (0.0, 0.0)
    assert (config.tensor_model_parallel_size, config.context_parallel_size, config.sequence_parallel) == (2, 2, True)


@pytest.mark.parametrize(
    ("change", "layout", "sentence"),
    [
        ({}, Layout(tp=3), "tensor_model_parallel_size=3 does not divide the model's num_attention_heads=4"),
        ({}, Layout(tp=4), "tensor_model_parallel_size=4 does not divide the model's num_key_value_heads=2"),
        ({"intermediate_size": 49}, Layout(tp=2), "tensor_model_parallel_size=2 does not divide the model's intermedi"),
        ({}, Layout(pp=3), "pipeline_model_parallel_size=3 does not divide the model's num_hidden_layers=4"),
        ({"use_sliding_window": True}, Layout(), "use_sliding_window=true is not supported; expected false"),
        ({"model_type": "gpt2"}, Layout(), "model_type 'gpt2' is not supported; expected one of ["),
        ({}, Layout(ep=2), "expert_model_parallel_size=2: the model has no experts; expected 1"),
        ({}, Layout(pp=2, vpp=3), "virtual_pipeline_model_parallel_size=3 does not divide the 2 layers of a pipeline"),
        (MIXTRAL, Layout(ep=3), "expert_model_parallel_size=3 does not divide the model's number of experts=4"),
        (MIXTRAL, Layout(etp=5), "expert_tensor_parallel_size=5 does not divide the model's intermediate size of an"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(change: dict[str, Any], layout: Layout, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        transformer_config(QWEN2 | change, layout, torch.float32)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    check_layout(QWEN2, Layout(tp=2, pp=2))  # while this is fine


def test_scaled_rope_reaches_the_model() -> None:
    """Head dimensions are 8: pairs turn by 1, 10^-1, 10^-2 and 10^-3 a position, and half of that when scaled."""
    scaled = QWEN2 | {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    found = unwrap(build_model(scaled, Layout())[0]).rotary_pos_emb.inv_freq
    assert found.tolist() == pytest.approx([0.5, 0.05, 0.005, 0.0005])


def test_yarns_factor_reaches_attention() -> None:
    scaled = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}}
    config = transformer_config(QWEN2 | scaled | {"max_position_embeddings": 64}, Layout(), torch.float32)
    assert config.softmax_scale == pytest.approx(8**-0.5 * 2.25)
    assert transformer_config(QWEN2, Layout(), torch.float32).softmax_scale is None


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no config\.json; expected the folder of a Hugging Face model$"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    assert read_hf_config(str(tmp_path)) == QWEN2


@pytest.mark.parametrize(
    ("layers", "layout", "chunks"),
    [
        (8, Layout(pp=4), (2, 2, 2, 2)),
        (8, Layout(pp=2, vpp=2), (2, 2, 2, 2)),
        (61, Layout(pp=4, last_stage_layers=13), (16, 16, 16, 13)),
        (8, Layout(pp=2, first_stage_layers=3, last_stage_layers=5), (3, 5)),
        (8, Layout(pp=2, vpp=2, first_stage_layers=2, last_stage_layers=6), (1, 3, 1, 3)),
        (14, Layout(pp=4, vpp=2, first_stage_layers=2, last_stage_layers=4), (1, 2, 2, 2, 1, 2, 2, 2)),
    ],
)
def test_layers_are_dealt_to_chunks_as_the_layout_says(layers: int, layout: Layout, chunks: tuple[int, ...]) -> None:
    """Chunk i, in the order of the layers, is on pipeline rank i % pp; where it starts Megatron agrees."""
    config = transformer_config(QWEN2 | {"num_hidden_layers": layers}, layout, torch.float32)
    assert layers_per_chunk(config) == chunks
    assert [sum(chunks[rank :: layout.pp]) for rank in range(layout.pp)] == layout.stage_layers(layers)
    for i in range(len(chunks)):
        stage = i // layout.pp if layout.vpp > 1 else None
        assert get_transformer_layer_offset(config, stage, i % layout.pp) == sum(chunks[:i])


def test_interleaved_stages_do_not_batch_what_they_send() -> None:
    plain, interleaved = (transformer_config(QWEN2, Layout(pp=2, vpp=vpp), torch.float32) for vpp in (1, 2))
    assert (plain.virtual_pipeline_model_parallel_size, plain.overlap_p2p_comm, plain.batch_p2p_comm) == (
        None, False, True,
    )  # fmt: skip
    assert interleaved.virtual_pipeline_model_parallel_size == 2
    assert (interleaved.overlap_p2p_comm, interleaved.batch_p2p_comm) == (True, False)


def test_an_actor_has_a_vocabulary_head_and_ties_it_as_the_config_says() -> None:
    (tied,), (untied,) = build_model(QWEN2, Layout()), build_model(QWEN3, Layout())
    names = {name for name, _ in tied.named_parameters()}
    assert "output_layer.weight" not in names
    assert "decoder.layers.3.self_attention.linear_qkv.bias" in names
    assert dict(untied.named_parameters())["output_layer.weight"].shape == (48, 32)
    assert "decoder.layers.0.self_attention.q_layernorm.weight" in dict(untied.named_parameters())


def test_a_critic_starts_with_values_of_zero_in_float32() -> None:
    (critic,) = build_model(QWEN2, Layout(), role="critic", dtype="bfloat16")
    inner = unwrap(critic)
    assert isinstance(inner, CriticModel)
    assert isinstance(inner.output_layer, ValueHead)
    assert inner.output_layer.weight.shape == (1, 32)
    assert not inner.output_layer.weight.any()
    with torch.no_grad():
        inner.output_layer.weight.fill_(0.5)
        values, _ = inner.output_layer(torch.ones(3, 1, 32, dtype=torch.bfloat16))
    assert values.dtype is torch.float32
    assert values.flatten().tolist() == [16.0, 16.0, 16.0]
