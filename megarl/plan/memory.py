"""Memory of one GPU while a role works: a rule of thumb that errs upwards, for choosing a layout.

    weights       2 bytes a parameter (4 in float32)
    gradients     4 bytes a parameter
    optimizer     a float32 copy of the weights, and adamw's two moments: 12 bytes a parameter (8 in float32), divided
                  by the data- and context-parallel ranks where use_distributed_optimizer is set
    (strategy fsdp divides all three so)
    activations   what a layer keeps of each token for its backward pass; of a recomputed layer its input only, and
                  once, doubled, all of the layer that is being recomputed
    reserve       RESERVE_BYTES: CUDA's context, NCCL's buffers, a chunk of logits, what sleeping servers keep, gaps

Only one role is counted: with param_offload and optimizer_offload the others are in the host's memory meanwhile.

Where servers share the GPU (rollout.placement=shared) two more phases want room, each without the rest of the above:

    push          the actor's weights, the server's, and a tensor on its way: cut, whole, and in a bucket; the largest
    writing       the server's memory_fraction of the GPU for weights and cache, and SERVER_BYTES
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megarl.layout import Layout
from megarl.plan.count import (
    HFConfig,
    Parameters,
    attention_size,
    expert_size,
    has_experts,
    layers_of_stage,
    num_experts,
    of_stage,
    whole,
)

RESERVE_BYTES = 8 * 10**9
SERVER_BYTES = 12 * 10**9  # what SGLang takes beside its memory_fraction: of a prefill, and for CUDA graphs
MOMENTS = {"adamw": 2, "sgd": 1, "muon": 1}  # float32 numbers that the optimizer keeps of each parameter


class Memory(NamedTuple):
    """Bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
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


def of_stage_bytes(hf: HFConfig, layout: Layout, stage: int, work: Work, role: str = "actor") -> Memory:
    """What a GPU of pipeline stage `stage` holds."""
    parameters = of_stage(hf, layout, stage, role)
    width = 4 if work.dtype == "float32" else 2
    part = _part(parameters, layout, work.num_ranks)
    held = part if work.fsdp else parameters.total
    weights, activations = width * held, _activations(hf, layout, stage, work, width)
    if work.optimizer is None:
        return Memory(weights, 0, 0, activations)
    moments = 4 * MOMENTS[work.optimizer] + (0 if work.dtype == "float32" else 4)
    learnt = part if layout.use_distributed_optimizer else held
    return Memory(weights, 4 * held, moments * learnt, activations)


def of_push_bytes(hf: HFConfig, layout: Layout, stage: int, work: Work, server_size: int) -> int:
    """What a GPU of the actor's pipeline stage holds while a server of `server_size` GPUs, one of them this, is pushed.

    Under fsdp, too, all of its stage: parameters are whole while others read them.
    """
    width = 4 if work.dtype == "float32" else 2
    largest = hf["hidden_size"] * max(hf["vocab_size"], hf["intermediate_size"])
    of_server = -(-whole(hf) // server_size)
    return width * (of_stage(hf, layout, stage).total + of_server + 3 * largest) + RESERVE_BYTES


def of_writing_bytes(gpu_bytes: int, memory_fraction: float) -> int:
    """What a GPU holds while its server writes and the trainer sleeps."""
    return int(memory_fraction * gpu_bytes) + SERVER_BYTES + RESERVE_BYTES


def _part(parameters: Parameters, layout: Layout, num_ranks: int) -> int:
    """Parameters of one of the ranks that share what each of them would otherwise hold alike."""
    dense = num_ranks // (layout.tp * layout.pp)
    experts = num_ranks // (layout.ep * layout.expert_tp * layout.pp)
    return -(-parameters.dense // dense) - (-parameters.experts // experts)


def _activations(hf: HFConfig, layout: Layout, stage: int, work: Work, width: int) -> int:
    tokens = -(-work.max_tokens // layout.cp)
    layers = layers_of_stage(hf, layout, stage)
    kept = [_kept(hf, layout, has_experts(hf, layer)) for layer in layers]
    if work.optimizer is None:
        return width * tokens * 2 * max(kept)
    split = layout.tp if layout.sequence_parallel else 1
    under_way = sum(kept) if not work.recompute else len(layers) * hf["hidden_size"] // split
    once = 2 * max(kept) if work.recompute else max(kept)  # gradients of what is kept come on top
    return int(width * tokens * (under_way * _micro_batches_under_way(layout, stage) + once))


def _kept(hf: HFConfig, layout: Layout, sparse: bool) -> int:
    """Numbers that a layer keeps of a token: the operands of its products, norms and attention."""
    hidden = hf["hidden_size"]
    split = layout.tp if layout.sequence_parallel else 1
    inner = _attention_kept(hf)
    if sparse:
        chosen, shared = hf["num_experts_per_tok"], hf.get("n_shared_experts") or 0
        inner += chosen * 2 * hidden + 3 * expert_size(hf) * (chosen + shared) + (num_experts(hf) or 0)
    else:
        inner += 3 * hf["intermediate_size"]
    return 4 * hidden // split + inner // layout.tp


def _attention_kept(hf: HFConfig) -> int:
    heads = hf["num_attention_heads"]
    if "kv_lora_rank" in hf:
        size = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]
        return heads * (2 * size + 2 * hf["v_head_dim"]) + hf["kv_lora_rank"] + (hf.get("q_lora_rank") or 0)
    return 2 * (heads + (hf.get("num_key_value_heads") or heads)) * attention_size(hf)


def _micro_batches_under_way(layout: Layout, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once, in units of all its layers (Megatron's 1F1B schedules)."""
    behind = layout.pp - stage
    if layout.vpp == 1:
        return behind
    return (2 * (behind - 1) + (layout.vpp - 1) * layout.pp + 1) / layout.vpp
