"""Memory of one GPU while a role works: a rule of thumb for choosing a layout, which is meant to err upwards.

It does so of all tensors that were measured on CPUs (benchmarks/results/plan_memory_*); seven peaks that others
published on GPUs lie between 5 % below what it says and 21 % above it (plan_*, rows of kind memory).

    weights       2 bytes a parameter (4 in float32)
    gradients     4 bytes a parameter
    optimizer     a float32 copy of the weights, and adamw's two moments: 12 bytes a parameter (8 in float32, but for
                  fsdp), divided by the data- and context-parallel ranks where use_distributed_optimizer is set
    gathered      strategy fsdp divides all three so, but for what is whole at a time: weights of two layers and of what
                  lies outside of layers (embedding, norm, head), and float32 gradients of one of these
    activations   what a layer keeps of each token for its backward pass; of a recomputed layer its input only, and
                  once, doubled, all of the layer that is being recomputed (without fused kernels half as much again);
                  of experts those of the busiest rank
    reserve       RESERVE_BYTES: CUDA's context, NCCL's buffers, a chunk of logits, what sleeping servers keep, gaps

Only one role is counted: with param_offload and optimizer_offload the others are in the host's memory meanwhile.

Where servers share the GPU (rollout.placement=shared) two more phases want room, each without the rest of the above:

    push          the actor's weights, the server's, the largest tensor cut and whole, and a bucket that holds it
    writing       the server's memory_fraction of the GPU for weights and cache, and SERVER_BYTES
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megarl.layout import Layout
from megarl.plan.memory.count import (
    HEAD_NORMS,
    HFConfig,
    Parameters,
    attention_size,
    expert_size,
    kinds_of_stage,
    num_experts,
    of_layer,
    of_stage,
    whole,
)
from megarl.plan.time.constants import CONSTANTS

RESERVE_BYTES = 8 * 10**9
SERVER_BYTES = 12 * 10**9  # what SGLang takes beside its memory_fraction: of a prefill, and for CUDA graphs
MOMENTS = {"adamw": 2, "sgd": 1, "muon": 1}  # float32 numbers that the optimizer keeps of each parameter


class Memory(NamedTuple):
    """Bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int = 0  # whole for a while, of what fsdp divides
    reserve: int = RESERVE_BYTES

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class Work:
    """What a role does with its model."""

    num_ranks: int
    max_tokens: int = 16384  # of a micro-batch
    recompute: bool = False  # whole layers are run again in the backward pass
    dtype: str = "bfloat16"
    optimizer: str | None = "adamw"  # None: a reference, which learns nothing
    fsdp: bool = False  # strategy=fsdp: each data-parallel rank keeps a part of everything
    local: bool = False  # layers without Transformer-Engine, which keep what its fused ones do not


def of_stage_bytes(hf: HFConfig, layout: Layout, stage: int, work: Work, role: str = "actor") -> Memory:
    """What a GPU of pipeline stage `stage` holds."""
    parameters = of_stage(hf, layout, stage, role)
    width = 4 if work.dtype == "float32" else 2
    part = part_of(parameters, layout, work.num_ranks)
    held = part if work.fsdp else parameters.total
    weights, activations = width * held, _activations(hf, layout, stage, work, width)
    gathered = _gathered(hf, layout, stage, parameters, work, width) if work.fsdp else 0
    if work.optimizer is None:
        return Memory(weights, 0, 0, activations, gathered)
    copy = 0 if work.dtype == "float32" and not work.fsdp else 4
    moments = 4 * MOMENTS[work.optimizer] + copy
    learnt = part if layout.use_distributed_optimizer else held
    return Memory(weights, 4 * held, moments * learnt, activations, gathered)


class PushMemory(NamedTuple):
    """Bytes on a GPU of the trainer while weights are on their way."""

    weights: int
    server: int  # the part of a server on the same GPU
    bucket: int  # a tensor cut and whole, and a bucket
    reserve: int = RESERVE_BYTES


def of_push(hf: HFConfig, layout: Layout, stage: int, work: Work, server_size: int, bucket_bytes: int) -> PushMemory:
    """What a GPU of the actor's pipeline stage holds while a server of `server_size` GPUs, one of them this, is pushed.

    Under fsdp, too, all of its stage: parameters are whole while others read them.  A tensor that is larger than a
    bucket goes in one of its own.
    """
    width = 4 if work.dtype == "float32" else 2
    largest = width * hf["hidden_size"] * max(hf["vocab_size"], hf["intermediate_size"])
    of_server = -(-whole(hf) // server_size)
    on_its_way = 2 * largest + max(largest, bucket_bytes)
    return PushMemory(width * of_stage(hf, layout, stage).total, width * of_server, on_its_way)


def part_of(parameters: Parameters, layout: Layout, num_ranks: int) -> int:
    """Parameters of one of the ranks that share what each of them would otherwise hold alike."""
    dense = num_ranks // (layout.tp * layout.pp)
    experts = num_ranks // (layout.ep * layout.expert_tp * layout.pp)
    return -(-parameters.dense // dense) - (-parameters.experts // experts)


def _gathered(hf: HFConfig, layout: Layout, stage: int, parameters: Parameters, work: Work, width: int) -> int:
    """What fsdp makes whole for a while: a layer, the next one meanwhile, and all that is in no layer."""
    kinds = kinds_of_stage(hf, layout, stage)
    of_one = {kind: of_layer(hf, layout, sparse=kind).total for kind in kinds}
    layer, outside = max(of_one.values()), parameters.total - sum(of_one[kind] * kinds[kind] for kind in kinds)
    return width * (2 * layer + outside) + (4 * max(layer, outside) if work.optimizer else 0)


def _activations(hf: HFConfig, layout: Layout, stage: int, work: Work, width: int) -> int:
    tokens = -(-work.max_tokens // layout.cp)
    kinds = kinds_of_stage(hf, layout, stage)
    busiest = CONSTANTS.expert_imbalance
    kept = {
        kind: locally_kept(hf, layout, kind) if work.local else kept_numbers(hf, layout, kind, busiest)
        for kind in kinds
    }
    most = max(kept.values())
    if work.optimizer is None:
        return width * tokens * 2 * most
    split = layout.tp if layout.sequence_parallel else 1
    all_kept = sum(count * kept[kind] for kind, count in kinds.items())
    under_way = sum(kinds.values()) * hf["hidden_size"] // split if work.recompute else all_kept
    # gradients of what is kept come on top; without fused kernels they were measured to be few
    once = (1.5 if work.local else 2) * most if work.recompute else most
    return int(width * tokens * (under_way * _micro_batches_under_way(layout, stage) + once))


def kept_numbers(hf: HFConfig, layout: Layout, sparse: bool, imbalance: float = 1.0) -> int:
    """Numbers that a layer keeps of a token: the operands of its products, norms and attention.

    imbalance: tokens that a rank's experts get over those that they would get if all got as many.
    """
    hidden = hf["hidden_size"]
    split = layout.tp if layout.sequence_parallel else 1
    inner = _attention_kept(hf)
    if sparse:
        chosen, shared = hf["num_experts_per_tok"], hf.get("n_shared_experts") or 0
        of_chosen = chosen * (2 * hidden + 3 * expert_size(hf))
        inner += int(imbalance * of_chosen) + 3 * expert_size(hf) * shared + (num_experts(hf) or 0)
    else:
        inner += 3 * hf["intermediate_size"]
    return 4 * hidden // split + inner // layout.tp


def locally_kept(hf: HFConfig, layout: Layout, sparse: bool) -> int:
    """The same without fused kernels, counted tensor by tensor in measured runs (test_measured_memory.py).

    Of latent attention and of shared experts, which were not measured, a plain layer's share more.
    """
    hidden = hf["hidden_size"]
    split = layout.tp if layout.sequence_parallel else 1
    if "kv_lora_rank" in hf:
        inner = 3 * _attention_kept(hf) // 2
    else:
        size, pairs = attention_size(hf), hf.get("num_key_value_heads") or hf["num_attention_heads"]
        queries, keys = hf["num_attention_heads"] * size, pairs * size
        inner = 3 * queries + 2 * keys + 4 * size + (3 * (queries + keys) if _has_head_norms(hf) else 0)
    if not sparse:
        return 6 * hidden // split + (inner + 5 * hf["intermediate_size"]) // layout.tp
    chosen, shared = hf["num_experts_per_tok"], hf.get("n_shared_experts") or 0
    inner += chosen * hidden + 6 * expert_size(hf) * (chosen + shared)
    return 6 * hidden // split + inner // layout.tp + 12 * (num_experts(hf) or 0)


def _attention_kept(hf: HFConfig) -> int:
    heads = hf["num_attention_heads"]
    if "kv_lora_rank" in hf:
        size = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]
        return heads * (2 * size + 2 * hf["v_head_dim"]) + hf["kv_lora_rank"] + (hf.get("q_lora_rank") or 0)
    times = 3 if _has_head_norms(hf) else 2  # a norm of queries and keys keeps its inputs
    return times * (heads + (hf.get("num_key_value_heads") or heads)) * attention_size(hf)


def _has_head_norms(hf: HFConfig) -> bool:
    return hf["model_type"] in HEAD_NORMS


def _micro_batches_under_way(layout: Layout, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once, in units of all its layers (Megatron's 1F1B schedules)."""
    behind = layout.pp - stage
    if layout.vpp == 1:
        return behind
    return (2 * (behind - 1) + (layout.vpp - 1) * layout.pp + 1) / layout.vpp
