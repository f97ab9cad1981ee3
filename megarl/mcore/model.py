"""A Megatron GPTModel from a Hugging Face config.json: an actor with a vocabulary head, a critic with a value head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megarl.mcore.attention import Norm, SDPAttention
from megarl.mcore.setup import Layout

# What differs between families that share this decoder: bias on q, k, v, and norms on q and k.
FAMILIES: dict[str, dict[str, bool]] = {
    "qwen2": {"add_qkv_bias": True, "qk_layernorm": False},
    "qwen3": {"add_qkv_bias": False, "qk_layernorm": True},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of an HF folder.  Raises a ValueError where there is none."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder}: there is no config.json; want the folder of a Hugging Face model")
    return json.loads(file.read_text())


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Megatron splits the vocabulary into tp equal parts; 8 rows each keep bf16 matrix products aligned."""
    return -(-vocab_size // (8 * tp)) * 8 * tp


def head_dim(hf: dict[str, Any]) -> int:
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def rope_theta(hf: dict[str, Any]) -> float:
    """transformers 5 keeps rope's settings in rope_parameters, older files at the top.  Scaled rope is refused."""
    settings = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind != "default":
        raise ValueError(f"config.json: rope type {kind!r} is not supported; want default")
    return float(settings.get("rope_theta", hf.get("rope_theta", 10000.0)))


def check_layout(hf: dict[str, Any], layout: Layout) -> None:
    """Raise a ValueError of one sentence where the model cannot be laid out so."""
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"config.json: model_type {family!r} is not supported; want one of {sorted(FAMILIES)}")
    if hf.get("use_sliding_window"):
        raise ValueError("config.json: use_sliding_window=true is not supported; want false")
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if hf[key] % layout.tp:
            raise ValueError(f"tensor_model_parallel_size={layout.tp} does not divide the model's {key}={hf[key]}")
    if hf["num_hidden_layers"] % layout.pp:
        raise ValueError(
            f"pipeline_model_parallel_size={layout.pp} does not divide the model's "
            f"num_hidden_layers={hf['num_hidden_layers']}"
        )


def transformer_config(hf: dict[str, Any], layout: Layout, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's own config of this model; the settings below the line are what packed RL training needs."""
    check_layout(hf, layout)
    return TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=head_dim(hf),
        layernorm_epsilon=hf.get("rms_norm_eps", 1e-6),
        init_method_std=hf.get("initializer_range", 0.02),
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        **FAMILIES[hf["model_type"]],
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sequence_parallel,
        # ---
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        calculate_per_token_loss=True,  # the loss is a weighted sum over tokens: see step.py
        variable_seq_lengths=True,  # packed rows differ in length from one micro-batch to the next
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths refuses the default, for dense models too
        use_cpu_initialization=not torch.cuda.is_available(),
        masked_softmax_fusion=False,  # needs Apex
        gradient_accumulation_fusion=False,  # needs Apex
    )


class _LocalProvider(LocalSpecProvider):
    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:  # noqa: ARG002
        return Norm

    def core_attention(self) -> type:
        return SDPAttention


def layer_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's local layer with norms and attention that take packed rows and every parallelism."""
    # get_gpt_layer_local_spec names its provider itself; we lend it ours for the call.
    with mock.patch.object(gpt_layer_specs, "LocalSpecProvider", _LocalProvider):
        layer = gpt_layer_specs.get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm, normalization=config.normalization
        )
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=Norm)


class ValueHead(nn.Linear):
    """[s, b, h] -> [s, b, 1] in float32; the same on every tensor-parallel rank, gathered over sequence parallelism."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
        self.sequence_parallel = config.sequence_parallel
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        nn.init.zeros_(self.weight)  # the first values are 0, whatever the backbone

    def forward(  # type: ignore[override]  # GPTModel calls it as it calls its output layer
        self, input_: Tensor, weight: Any = None, runtime_gather_output: Any = None
    ) -> tuple[Tensor, None]:
        values = F.linear(input_.float(), self.weight.float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class CriticModel(GPTModel):
    """GPTModel whose output is one value a token."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.post_process:
            self.output_layer = ValueHead(self.config)


def build_model(hf: dict[str, Any], layout: Layout, *, role: str = "actor", dtype: str = "float32") -> nn.Module:
    """This rank's part of the model, on its device.  role is "actor" (also for a reference) or "critic"."""
    config = transformer_config(hf, layout, DTYPES[dtype])
    kind = CriticModel if role == "critic" else GPTModel
    model: nn.Module = kind(
        config=config,
        transformer_layer_spec=layer_spec(config),
        vocab_size=padded_vocab_size(hf["vocab_size"], layout.tp),
        max_sequence_length=hf.get("max_position_embeddings", 4096),
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=role != "critic" and bool(hf.get("tie_word_embeddings")),
        position_embedding_type="rope",
        rotary_base=rope_theta(hf),
    )
    if torch.cuda.is_available():
        model = model.cuda()
    return Float16Module(config, model) if config.bf16 else model


def unwrap(model: nn.Module) -> GPTModel:
    """The GPTModel inside DistributedDataParallel and Float16Module."""
    inner: Any = model
    while not isinstance(inner, GPTModel):
        inner = inner.module
    return inner
