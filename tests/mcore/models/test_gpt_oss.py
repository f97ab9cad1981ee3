"""What Megatron is told about gpt-oss, and the parameters of which every rank has its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from packaging.version import Version
from torch import nn

from megarl.layout import Layout
from megarl.mcore.models import model
from megarl.mcore.models.families import family_of
from megarl.mcore.models.gpt_oss import prepare_biases
from megarl.mcore.models.model import transformer_config
from megarl.mcore.training.execution import ExecutionOptions

pytestmark = pytest.mark.usefixtures("one_rank")

# The numbers of the hub's config.json of gpt-oss-20b that a test looks at; fewer layers.
HF: dict[str, Any] = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def settings(**changes: Any) -> dict[str, Any]:
    hf = {key: value for key, value in (HF | changes).items() if value is not ...}
    return family_of(hf).settings(hf)


def test_the_real_model_is_described() -> None:
    found = settings()
    assert (found["num_moe_experts"], found["moe_router_topk"], found["moe_ffn_hidden_size"]) == (32, 4, 2880)
    assert not found["moe_router_pre_softmax"], "the chosen experts' weights sum to 1"
    assert (found["window_size"], found["window_attn_skip_freq"]) == ((127, 0), [1, 0, 1, 0])
    assert (found["activation_func"], found["glu_linear_offset"]) == (quick_gelu, 1.0)
    assert (found["activation_func_clamp_value"], found["softmax_type"]) == (7.0, "learnable")
    assert found["add_bias_linear"]
    assert found["softmax_scale"] == pytest.approx((0.1 * 3.4657359 + 1) ** 2 / 8), "YaRN with a factor of 32"


def test_every_second_layer_has_a_window_where_config_json_does_not_say() -> None:
    assert settings(layer_types=...)["window_attn_skip_freq"] == [1, 0, 1, 0]
    assert settings(layer_types=["full_attention"] * 4)["window_attn_skip_freq"] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"attention_bias": False}, "attention_bias=false is not supported; expected true"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported; expected 1.702"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8'; expected mxfp4 or none"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types holds chunked_attention; expected sliding_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries; expected num_hidden_layers=4"),
        ({"sliding_window": None}, "there is no sliding_window; expected the config of a gpt_oss model"),
    ],
)
def test_other_mathematics_is_refused_in_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        settings(**change)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_experts_with_biases_are_whole() -> None:
    assert transformer_config(HF, Layout(ep=2), torch.float32).add_bias_linear
    with pytest.raises(ValueError, match="^expert_tensor_parallel_size=2: Megatron-Core does not cut experts with"):
        transformer_config(HF, Layout(tp=2), torch.float32)


def test_what_every_rank_has_for_itself_is_counted_everywhere_and_summed_nowhere() -> None:
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
    monkeypatch.setattr(model, "is_te_min_version", lambda least: Version(version) >= Version(least))
    monkeypatch.setattr(model, "get_te_version", lambda: version)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    monkeypatch.setattr(ExecutionOptions, "uses_transformer_engine", True)
    if fits:
        model._check_sinks(Layout(), ExecutionOptions())
    else:
        with pytest.raises(
            ValueError, match=f"need Transformer Engine 2.12 and cuDNN 9.18, found {version} and {cudnn};"
        ):
            model._check_sinks(Layout(), ExecutionOptions())
