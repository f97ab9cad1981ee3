"""A Megatron GPTModel from a Hugging Face config.json: an actor with a vocabulary head, a critic with a value head."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import get_te_version, is_te_min_version
from torch import Tensor, nn

from megarl.arch.layout import Layout, exchange_misfits, misfits, numbers_of, padded_vocab_size
from megarl.arch.megatron_fields import FUSIONS
from megarl.arch.settings.hf import HFConfig
from megarl.arch.settings.rope import make_rope
from megarl.mcore.models.biases import keep_float32, prepare_biases
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.families import family_of
from megarl.mcore.models.fusions import available_fusions, fuse_weight_gradients
from megarl.mcore.models.layers import block_spec
from megarl.mcore.models.mtp import mtp_block, mtp_settings
from megarl.mcore.models.transformer_engine import mark_shards, share_sinks

Model = list[nn.Module]  # this rank's chunks in layer order: one, or one for each interleaved stage
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_layout(hf: HFConfig, layout: Layout) -> None:
    """Raise a ValueError of one sentence if the model cannot be built, or not in this layout."""
    family_of(hf).settings(hf)
    for misfit in misfits(numbers_of(hf), layout):
        raise ValueError(misfit.sentence)


def transformer_config(
    hf: HFConfig, layout: Layout, dtype: torch.dtype, engine: ExecutionOptions = ExecutionOptions()
) -> TransformerConfig:
    """Megatron's config of this model: its family's settings, its layout, and the settings for packed RL training."""
    check_layout(hf, layout)
    family = family_of(hf)
    numbers = numbers_of(hf)
    settings = {"cp_comm_type": "a2a" if numbers.exchanges_heads else None} | family.settings(hf)
    if torch.cuda.is_available():
        for misfit in exchange_misfits(numbers, layout):
            raise ValueError(misfit.sentence)
        if settings.get("softmax_type") == "learnable":
            _check_sinks(engine)
    # variable_seq_lengths refuses Megatron's default, allgather, for dense models too
    dispatcher = engine.dispatcher(layout.ep * layout.expert_tp, dtype) if numbers.num_experts else "alltoall"
    latent = issubclass(family.config, MLATransformerConfig)
    ours = dict(
        **settings,
        **_pipeline(layout),
        **available_fusions(
            uses_transformer_engine=engine.uses_transformer_engine,
            latent_attention=latent,
            biases=bool(settings.get("add_bias_linear")),
            gated=bool(settings["gated_linear_unit"]),
            fsdp=engine.strategy == "fsdp",
        ),
        **engine.transformer_settings(),
        **mtp_settings(hf),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        sequence_parallel=layout.sequence_parallel,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        calculate_per_token_loss=True,  # the loss is a weighted sum over tokens: see step.py
        variable_seq_lengths=True,  # packed rows differ in length from one micro-batch to the next
        moe_token_dispatcher_type=dispatcher,  # of flex, DeepEP is the default backend
        use_cpu_initialization=not torch.cuda.is_available(),
    )
    set_twice = ours.keys() & engine.override_transformer_config.keys() - set(FUSIONS)
    assert not set_twice, f"{sorted(set_twice)}: refused when the configuration was read"
    chosen = ours | dict(engine.override_transformer_config)
    # The name is older than its meaning: activations are modules of the layers' specs.
    chosen["use_te_activation_func"] = not engine.uses_transformer_engine and _has_our_gate(chosen)
    return family.config(**chosen)


def _has_our_gate(settings: dict[str, Any]) -> bool:
    """Whether a feed-forward of local layers is gated by `pointwise.Gate`, and not by a fused kernel."""
    is_plain = settings.get("activation_func_clamp_value") is None and not settings.get("glu_linear_offset")
    return settings.get("activation_func") is F.silu and is_plain and not settings.get("bias_activation_fusion")


def _check_sinks(engine: ExecutionOptions) -> None:
    """Raise a ValueError of one sentence if attention sinks over packed rows cannot be computed on this GPU."""
    if not engine.uses_transformer_engine:
        return
    cudnn = torch.backends.cudnn.version() or 0
    if not (is_te_min_version("2.12.0") and cudnn >= 91800):
        raise ValueError(
            f"transformer_impl=transformer_engine: attention sinks need Transformer Engine 2.12 and cuDNN 9.18, found "
            f"{get_te_version()} and {cudnn}; expected these, or transformer_impl=local"
        )


def _pipeline(layout: Layout) -> dict[str, Any]:
    """Settings of the pipeline stages and their communication.

    Batched sends and receives are matched by their order.  With two pipeline ranks the next rank is also the previous
    one and the orders at the two ends differ: interleaved stages would silently receive each other's tensors.

    On a GPU a stage frees its output once it is sent.  Not with interleaved stages: Megatron then frees it while it is
    still being sent, and torch keeps for the sender the tensor object, but not the memory that this object loses.
    """
    first, last = layout.first_stage_layers, layout.last_stage_layers
    return {
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": first,
        # With two stages one number suffices; with both, Megatron would divide by the 0 stages between them.
        "num_layers_in_last_pipeline_stage": None if layout.pp == 2 and first is not None else last,
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        "deallocate_pipeline_outputs": torch.cuda.is_available() and layout.pp > 1 and layout.vpp == 1,
    }


class ValueHead(nn.Linear):
    """[s, b, h] -> [s, b, 1] in float32; the same on every tensor-parallel rank, gathered over sequence parallelism."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
        self.sequence_parallel = config.sequence_parallel
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        nn.init.zeros_(self.weight)  # the first values are 0 for any backbone

    def forward(  # type: ignore[override]  # GPTModel calls it as it calls its output layer
        self, input_: Tensor, weight: Any = None, runtime_gather_output: Any = None
    ) -> tuple[Tensor, None]:
        values = F.linear(input_.float(), self.weight.float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class VocabularyHead(ColumnParallelLinear):
    """Megatron's output layer, which returns the hidden states unchanged: `fused.py` multiplies by its weight.

    Under sequence parallelism they are this rank's part.  It stays a called module with the same parameter name,
    because hooks, checkpoints and exports depend on both.
    """

    in_graph = False  # whether the weight's gradient waits for that of the model's output: wrappers.wrap_fsdp
    _weight_in_graph: Tensor | None = None

    def forward(
        self, input_: Tensor, weight: Any = None, runtime_gather_output: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        self._weight_in_graph = None
        if self.in_graph and torch.is_grad_enabled():
            input_, self._weight_in_graph = _Together.apply(input_, self.weight)
        return input_, None

    @property
    def weight_in_graph(self) -> Tensor:
        """[V/tp, H], of the last forward pass."""
        return self.weight if self._weight_in_graph is None else self._weight_in_graph


class _Together(torch.autograd.Function):
    """Two tensors as they are; the gradient of neither goes on before both are there."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return one.view_as(one), other.view_as(other)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


class ActorModel(GPTModel):
    """GPTModel whose output is the last hidden state of each token, [1, T, H].

    In training the hidden states of MTP layers follow it, [1 + layers, T, H].
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.post_process:
            # Not a new layer: a second [V, H] would be allocated.  The subclass only adds a forward.
            self.output_layer.__class__ = VocabularyHead
        if self.mtp_process and self.share_embeddings_and_output_weights:
            # MTP layers have the embedding on the last stage: a copy that Megatron makes for the head stays unused.
            self.output_layer.weight = None
            self.embedding.word_embeddings.weight.zero_out_wgrad = True  # its own gradient comes beside the head's

    def _postprocess(self, *, hidden_states: Tensor, **given: Any) -> Tensor:
        """`hidden_states`: [T, 1, H].  Megarl computes the loss of MTP layers, as all others, from hidden states."""
        if not self.mtp_process:
            out: Tensor = super()._postprocess(hidden_states=hidden_states, **given)
            return out
        states, _ = self.output_layer(hidden_states)
        if self.training:
            names = ("input_ids", "position_ids", "attention_mask", "rotary_pos_emb", "packed_seq_params")
            needed = {name: given[name] for name in names}
            states = self.mtp(hidden_states=states, embedding=self.embedding, **needed)
        return states.unflatten(0, (-1, len(hidden_states)))[:, :, 0]


class CriticModel(GPTModel):
    """GPTModel whose output is one value for each token."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.post_process:
            self.output_layer = ValueHead(self.config)


def build_model(
    hf: HFConfig,
    layout: Layout,
    *,
    role: str = "actor",
    dtype: str = "float32",
    engine: ExecutionOptions = ExecutionOptions(),
) -> Model:
    """This rank's part of the model, on its device.  role is "actor" (also for a reference) or "critic"."""
    chunks = make_chunks(hf, layout, role=role, dtype=dtype, engine=engine)
    return [_on_device(gpt, family_of(hf).float32) for gpt in chunks]


def make_chunks(
    hf: HFConfig,
    layout: Layout,
    *,
    role: str = "actor",
    dtype: str = "float32",
    engine: ExecutionOptions = ExecutionOptions(),
) -> list[GPTModel]:
    """The chunks before they move to the device and are cast to bfloat16; they share one config."""
    config = transformer_config(hf, layout, DTYPES[dtype], engine)
    kind, has_rope = CriticModel if role == "critic" else ActorModel, family_of(hf).has_rope
    chunks: list[GPTModel] = []
    for stage in range(layout.vpp) if layout.vpp > 1 else (None,):
        layers = block_spec(config, family_of(hf).layer, engine, stage)
        gpt = kind(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=padded_vocab_size(hf["vocab_size"], layout.tp),
            max_sequence_length=hf.get("max_position_embeddings", 4096),
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            parallel_output=True,
            share_embeddings_and_output_weights=role != "critic" and bool(hf.get("tie_word_embeddings")),
            position_embedding_type="rope" if has_rope else "none",
            vp_stage=stage,
            mtp_block_spec=mtp_block(config, layers),
        )
        prepare_biases(gpt)
        if has_rope and not config.multi_latent_attention:  # each of its attention layers has its own rope
            gpt.rotary_pos_emb.inv_freq = make_rope(hf, config.kv_channels).frequencies
        if engine.uses_transformer_engine:
            mark_shards(gpt)
            if layout.cp > 1:
                share_sinks(gpt, layout.cp)
            if engine.strategy != "fsdp":
                fuse_weight_gradients(gpt)
        chunks.append(gpt)
    return chunks


def _on_device(gpt: GPTModel, float32: tuple[str, ...]) -> nn.Module:
    chunk: nn.Module = gpt.cuda() if torch.cuda.is_available() else gpt
    chunk = Float16Module(gpt.config, chunk) if gpt.config.bf16 else chunk
    keep_float32(chunk, float32)
    return chunk


def unwrap(chunk: nn.Module) -> GPTModel:
    """The GPTModel inside DistributedDataParallel and Float16Module."""
    inner: Any = chunk
    while not isinstance(inner, GPTModel):
        inner = inner.module
    return inner


def whole_name(gpt: Any, name: str) -> str:
    """The name of a parameter or module of this chunk -> its name in the whole model.

    There layers and experts are numbered over all ranks.  Example, on the second of two stages of 4 layers, and the
    second of two ranks that have 8 experts each: decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight ->
    decoder.layers.4.mlp.experts.local_experts.9.linear_fc1.weight.
    """
    block = r"((?:decoder|mtp)\.layers\.\d+(?:\.mtp_model_layer)?)\."
    found = re.match(block + r"(mlp\.experts\.local_experts\.)?(\d+)?", name)
    if not found:
        return name
    path, experts, expert = found.groups()
    layer: Any = gpt.get_submodule(path)
    whole = f"{path}." if path.startswith("mtp.") else f"decoder.layers.{layer.layer_number - 1}."
    if experts:
        whole += f"{experts}{layer.mlp.local_expert_indices[int(expert)]}"
    return whole + name[found.end() :]


def output_weight(chunk: nn.Module) -> Tensor:
    """[V/tp, H]: the weight with which an actor's last chunk computes logits: its own, or the embedding's if tied."""
    gpt: Any = unwrap(chunk)
    is_tied = gpt.share_embeddings_and_output_weights
    weight: Tensor = gpt.shared_embedding_or_output_weight() if is_tied else gpt.output_layer.weight_in_graph
    return weight
