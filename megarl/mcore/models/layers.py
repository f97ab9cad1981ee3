"""Megatron's layers, built from our modules or Transformer Engine's: the same structure and parameter names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any
from unittest import mock

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from megarl.mcore.models.attention import SDPAttention
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.pointwise import Gate, Norm
from megarl.mcore.models.transformer_engine import TransformerEngineProvider
from megarl.mcore.versions import parts_of

LayerSpec = Callable[[TransformerConfig, int], ModuleSpec]  # (config, number of the layer in the model, from 0)


class LocalProvider(LocalSpecProvider):
    """Norms and attention that support packed rows and every parallelism (Megatron's norm refuses sequence
    parallelism, torch_norm:32), and the gate of experts.
    """

    def layer_norm(self, *_: bool, **__: bool) -> type:
        return Norm

    def core_attention(self) -> type:
        return SDPAttention

    def activation_func(self) -> type:
        return Gate


class Whole(nn.Linear):
    """A linear that every tensor-parallel rank has whole, with the arguments that Megatron passes to linears.

    With sequence parallelism a rank has its own tokens, and Megatron sums the gradient over tensor-parallel ranks.
    """

    def __init__(self, size: int, out: int, *, config: TransformerConfig, bias: bool, **_: Any) -> None:
        super().__init__(size, out, bias=bias, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # as Megatron's linears
        """[..., size] -> [..., out]."""
        return super().forward(x), None


def local_layer(config: TransformerConfig, number: int) -> ModuleSpec:
    """Layer `number`: attention with fused q, k, v, and a gated feed-forward or experts; for `block_spec`."""
    has_experts = layers_with_experts(config)[number]
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    if not has_experts:  # of experts the provider says it
        parts_of(spec.submodules.mlp).activation_func = Gate  # used with config.use_te_activation_func alone
    return spec


def layers_with_experts(config: TransformerConfig) -> list[bool]:
    """For each layer of the whole model: whether it has experts."""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    every = config.moe_layer_freq
    return [bool(x) for x in every] if isinstance(every, list) else [i % every == 0 for i in range(config.num_layers)]


def layers_per_chunk(config: TransformerConfig) -> tuple[int, ...]:
    """Layers in each chunk of the whole model, in layer order: chunk i is on pipeline rank i % pp."""
    ranks, chunks = range(config.pipeline_model_parallel_size), config.virtual_pipeline_model_parallel_size
    stages = (None,) if chunks is None else range(chunks)
    return tuple(get_num_layers_to_build(config, stage, rank) for stage in stages for rank in ranks)


def _split(layers: list[bool], sizes: Iterable[int]) -> Iterator[list[bool]]:
    left = iter(layers)
    return (list(islice(left, size)) for size in sizes)


def check_trainable(config: TransformerConfig) -> None:
    """Raise a ValueError for a layout of experts that Megatron can run, but cannot train and save."""
    tp, pp, ep = (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.expert_model_parallel_size,
    )
    if config.num_moe_experts is not None and tp > 1 and not config.sequence_parallel:
        raise ValueError(
            f"sequence_parallel=false: expected true to train experts with tensor_model_parallel_size={tp}"
        )  # moe_layer:379
    etp = config.expert_tensor_parallel_size
    if config.num_moe_experts is not None and ep == 1 and etp != tp:  # reduced over the wrong ranks: layers.py:829
        raise ValueError(
            f"expert_tensor_parallel_size={etp}: experts are not trained with it and expert_model_parallel_size=1; "
            f"expected {tp}, as tensor_model_parallel_size, or expert_model_parallel_size above 1"
        )
    chunks = list(_split(layers_with_experts(config), layers_per_chunk(config)))
    have = [any(any(chunk) for chunk in chunks[stage::pp]) for stage in range(pp)]
    if ep > 1 and not all(have):  # experts have their own optimizer; each rank saves as many optimizers as rank 0
        raise ValueError(
            f"pipeline_model_parallel_size={pp}: stage {have.index(False)} would hold no experts, which "
            f"expert_model_parallel_size={ep} does not train; expected fewer stages, or 1"
        )


def block_spec(
    config: TransformerConfig,
    layer: LayerSpec = local_layer,
    engine: ExecutionOptions = ExecutionOptions(),
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules:
    """The layers of a chunk, and the final norm.  `vp_stage`: which chunk of this rank; None if it has only one."""
    first = get_transformer_layer_offset(config, vp_stage)
    here = range(first, first + get_num_layers_to_build(config, vp_stage))
    provider = TransformerEngineProvider if engine.uses_transformer_engine else LocalProvider
    # Megatron's function has its provider hard-coded; it is replaced by ours during the call.
    with mock.patch.object(gpt_layer_specs, "LocalSpecProvider", provider):
        specs = [layer(config, number) for number in here]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=provider().layer_norm())
