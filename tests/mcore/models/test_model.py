"""Megatron's config of a Hugging Face model, what is refused, and the value head."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_configs import hf_of
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from packaging.version import Version
from torch import nn

from megarl.arch.hf_config import completed, read_hf_config
from megarl.arch.layout import Layout
from megarl.mcore.models import model as model_module
from megarl.mcore.models.biases import prepare_biases
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.layers import layers_per_chunk
from megarl.mcore.models.model import (
    CriticModel,
    ValueHead,
    build_model,
    transformer_config,
    unwrap,
)

RAW: dict[str, Any] = {  # as transformers 4 wrote it
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
QWEN2 = completed(RAW)
QWEN3 = hf_of("qwen3", rms_norm_eps=1e-5)


def test_qwen2_as_transformers_4_wrote_it_and_qwen3() -> None:
    qwen2 = transformer_config(QWEN2, Layout(), torch.float32)
    assert (qwen2.num_layers, qwen2.hidden_size, qwen2.ffn_hidden_size) == (4, 32, 48)
    assert (qwen2.num_attention_heads, qwen2.num_query_groups, qwen2.kv_channels) == (4, 2, 8)
    assert (qwen2.add_qkv_bias, qwen2.qk_layernorm, qwen2.layernorm_epsilon) == (True, False, 1e-6)
    assert (qwen2.normalization, qwen2.gated_linear_unit, qwen2.activation_func) == ("RMSNorm", True, F.silu)
    qwen3 = transformer_config(QWEN3, Layout(), torch.bfloat16)
    assert (qwen3.layernorm_epsilon, qwen3.kv_channels) == (1e-5, 16)
    assert (qwen3.bf16, qwen3.params_dtype, qwen3.pipeline_dtype) == (True, torch.bfloat16, torch.bfloat16)


def test_another_kind_of_model_and_a_layout_that_does_not_fit_are_refused() -> None:
    """Of layouts tests/arch/test_layout.py has them all, of settings test_families.py."""
    with pytest.raises(ValueError, match=r"^[^\n]*model_type 'gpt2' is not supported; expected one of \[[^\n]*$"):
        transformer_config(QWEN2 | {"model_type": "gpt2"}, Layout(), torch.float32)
    with pytest.raises(ValueError, match="expert_model_parallel_size=2: the model has no experts; expected 1"):
        transformer_config(QWEN2, Layout(ep=2), torch.float32)


def test_scaled_rope_reaches_the_model() -> None:
    """Head dimensions are 8: pairs turn by 1, 10^-1, 10^-2 and 10^-3 a position, and half of that when scaled."""
    scaled = completed(RAW | {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    found = unwrap(build_model(scaled, Layout())[0]).rotary_pos_emb.inv_freq
    assert found.tolist() == pytest.approx([0.5, 0.05, 0.005, 0.0005])


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no config\.json; expected the folder of a Hugging Face model$"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(RAW))
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


def test_what_every_rank_has_for_itself_is_counted_everywhere_and_summed_nowhere() -> None:
    """Biases of experts, and sinks."""
    model, one = nn.Module(), nn.Module()
    model.experts, one.linear_fc2, one.linear_fc1 = nn.ModuleList([one]), nn.Linear(2, 2), nn.Linear(2, 2)
    model.core, model.linear_fc2 = nn.Module(), nn.Linear(2, 2)
    model.core.softmax_offset = nn.Parameter(torch.zeros(1))
    for param in model.parameters():
        param.sequence_parallel = True
    holder = nn.Module()
    holder.mlp = model
    prepare_biases(holder)
    marked = {n for n, p in holder.named_parameters() if getattr(p, "tensor_model_parallel", False)}
    assert marked == {"mlp.experts.0.linear_fc2.bias", "mlp.core.softmax_offset"}
    assert {n for n, p in holder.named_parameters() if not p.sequence_parallel} == {"mlp.experts.0.linear_fc2.bias"}


@pytest.mark.parametrize(
    ("version", "cudnn", "fits"), [("2.12.0", 91800, True), ("2.11.0", 91800, False), ("2.12.0", 91701, False)]
)
def test_on_a_gpu_sinks_need_versions_that_compute_them(
    monkeypatch: pytest.MonkeyPatch, version: str, cudnn: int, fits: bool
) -> None:
    monkeypatch.setattr(model_module, "is_te_min_version", lambda least: Version(version) >= Version(least))
    monkeypatch.setattr(model_module, "get_te_version", lambda: version)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    monkeypatch.setattr(ExecutionOptions, "uses_transformer_engine", True)
    if fits:
        model_module._check_sinks(ExecutionOptions())
    else:
        needs = f"need Transformer Engine 2.12 and cuDNN 9.18, found {version} and {cudnn};"
        with pytest.raises(ValueError, match=needs):
            model_module._check_sinks(ExecutionOptions())
