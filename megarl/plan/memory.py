"""Memory of a GPU while a role works: a rule of thumb for choosing a layout, intended to overestimate.

It overestimates all peaks of tensors measured on CPUs (benchmarks/results/plan_memory_*); seven published peaks on GPUs
are between 5 % below and 21 % above the prediction (plan_*, rows of kind memory).

    weights       2 bytes per parameter (4 in float32)
    gradients     4 bytes per parameter
    optimizer     a float32 copy of the weights, and adamw's two moments: 12 bytes per parameter (8 in float32, except
                  with fsdp; with adam on the host the copy alone), divided by the data- and context-parallel ranks if
                  use_distributed_optimizer is set
    gathered      strategy fsdp divides all three in the same way, except for what is unsharded at a time: weights of
                  two layers and of everything outside layers (embedding, norm, head), and float32 gradients of one of
                  these
    activations   what a layer keeps of each token for its backward pass; of a recomputed layer only its input, plus
                  once, doubled, the layer that is being recomputed (1.5 times without fused kernels); of a layer
                  with recompute_modules all but what these keep, plus once the most that they keep of a layer, while
                  they are being recomputed; for experts, those of the busiest rank
    communicators NCCL's buffers: COMMUNICATOR_BYTES, which was never measured here, for each group of ranks in use
    reserve       RESERVE_BYTES: CUDA's context, a chunk of logits, memory that released servers keep, fragmentation

Only one role is counted: with param_offload and optimizer_offload the others are in host memory.

At the start, with use_distributed_optimizer, Megatron's DistributedDataParallel copies the weights into a buffer: there
are two of them beside the gradients.

With colocation (rollout.placement=shared) two more phases need memory, each without the rest of the above:

    push          the actor's weights, the server's, the largest tensor sharded and whole, and two buckets, each of
                  which holds it: one is filled while servers load the other
    generation    the server's memory_fraction of the GPU for weights and cache, and SERVER_BYTES
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from megarl.arch.layers import (
    CHUNK,
    Attention,
    DeltaNet,
    Experts,
    FeedForward,
    IndexedAttention,
    LatentAttention,
    Mamba,
)
from megarl.arch.layout import Layout
from megarl.plan.adapters import trained
from megarl.plan.constants import CONSTANTS
from megarl.plan.job import Role
from megarl.weights.count import Kind, Parameters, kinds_of_stage, largest_tensor, of_stage

RESERVE_BYTES = 8 * 10**9
COMMUNICATOR_BYTES = 150 * 10**6
SERVER_BYTES = 12 * 10**9  # SGLang's memory in addition to memory_fraction: for prefill and CUDA graphs
MOMENTS = {"adamw": 2, "sgd": 1, "muon": 1}  # float32 numbers that the optimizer keeps per parameter


class Memory(NamedTuple):
    """Bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int = 0  # temporarily unsharded parameters and gradients of fsdp
    reserve: int = RESERVE_BYTES

    @property
    def total(self) -> int:
        return sum(self)


def of_stage_bytes(role: Role, stage: int) -> Memory:
    """Memory on a GPU of pipeline stage `stage`.  What is frozen, with LoRA the base, has weights and activations."""
    parameters, learnt = of_stage(role.hf, role.layout, stage, role.name, role.mtp), trained(role, stage)
    there = part_of(parameters, role.layout, role.num_ranks) if role.fsdp else parameters.total
    weights, activations = role.width * there, _activations(role, stage)
    gathered = _gathered(role, stage, parameters) if role.fsdp else 0
    if role.optimizer is None:
        return Memory(weights, 0, 0, activations, gathered)
    part = part_of(learnt, role.layout, role.num_ranks)
    held = part if role.fsdp and not role.lora_rank else learnt.total
    if role.lora_rank:
        weights += role.width * held
    copy = 0 if role.dtype == "float32" and not role.fsdp else 4
    moments = (0 if role.optimizer_on_host else 4 * MOMENTS[role.optimizer]) + copy
    optimized = part if role.layout.use_distributed_optimizer else held
    return Memory(weights, 4 * held, moments * optimized, activations, gathered)


def fullest(role: Role) -> Memory:
    """Memory of the role's largest stage."""
    return max((of_stage_bytes(role, stage) for stage in range(role.layout.pp)), key=lambda memory: memory.total)


def communicator_bytes(layout: Layout, num_ranks: int, *, has_experts: bool) -> int:
    """Of the groups with several ranks that a rank of this layout sends in."""
    shared = num_ranks // (layout.tp * layout.pp)  # data- and context-parallel ranks
    sizes = [num_ranks, layout.tp, layout.pp, layout.cp, shared, layout.tp * layout.cp if layout.cp > 1 else 1]
    if has_experts:
        ranks = layout.ep * layout.expert_tp
        sizes += [layout.ep, ranks if layout.expert_tp > 1 else 1, num_ranks // (ranks * layout.pp)]
    return COMMUNICATOR_BYTES * sum(size > 1 for size in sizes)


def push_bucket_bytes(actor: Role, bucket_bytes: int) -> int:
    """Bytes on a GPU of the trainer for tensors in a push: the largest, sharded and whole, and two buckets.

    A tensor larger than bucket_bytes gets its own bucket.
    """
    largest = actor.width * largest_tensor(actor.hf)
    return 2 * largest + 2 * max(largest, bucket_bytes // 2)


def part_of(parameters: Parameters, layout: Layout, num_ranks: int) -> int:
    """Parameters per rank when the data- and context-parallel replicas share them."""
    dense = num_ranks // (layout.tp * layout.pp)
    experts = num_ranks // (layout.ep * layout.expert_tp * layout.pp)
    return -(-parameters.dense // dense) - (-parameters.experts // experts)


def _gathered(role: Role, stage: int, parameters: Parameters) -> int:
    """Bytes that fsdp unshards temporarily: a layer, the prefetched next layer, and everything outside layers."""
    kinds = kinds_of_stage(role.hf, role.layout, stage)
    of_one = {kind: kind.parameters(role.layout).total for kind in kinds}
    layer, outside = max(of_one.values()), parameters.total - sum(of_one[kind] * kinds[kind] for kind in kinds)
    return role.width * (2 * layer + outside) + (4 * max(layer, outside) if role.optimizer else 0)


def _activations(role: Role, stage: int) -> int:
    layout, in_full = role.layout, role.recompute == "full"
    tokens = -(-(role.max_tokens if role.optimizer else role.log_prob_tokens) // layout.cp)
    kinds = kinds_of_stage(role.hf, layout, stage, role.mtp)
    whole = {kind: _kept(role, kind, ()) for kind in kinds}
    most, choosing = max(whole.values()), max(_scores_of_indexer(role, kind) for kind in kinds)
    if role.optimizer is None:
        return role.width * tokens * (2 * most + choosing)
    split = layout.tp if layout.sequence_parallel else 1
    again = role.recompute_modules if role.recompute == "selective" else ()
    kept = {kind: _kept(role, kind, again) for kind in kinds}
    mtp = role.mtp if stage == layout.pp - 1 else 0  # an embedding, and operands of norms and a projection
    all_kept = sum(count * kept[kind] for kind, count in kinds.items()) + 6 * mtp * role.hf["hidden_size"] // split
    under_way = (sum(kinds.values()) + mtp) * role.hf["hidden_size"] // split if in_full else all_kept
    # gradients of kept activations are added; without fused kernels measurements show fewer
    modules = max(whole[kind] - kept[kind] for kind in kinds)  # of the layer whose modules are being recomputed
    once = choosing + ((1.5 if role.local else 2) * most if in_full else most + modules)
    return int(role.width * tokens * (under_way * _micro_batches_under_way(layout, stage) + once))


def _kept(role: Role, kind: Kind, again: Collection[str]) -> int:
    hidden, scores = role.hf["hidden_size"], kept_scores(kind, role.layout, role.max_tokens, role.width)
    if role.local:
        return scores + locally_kept(kind, hidden, role.layout, again)
    return scores + kept_numbers(kind, hidden, role.layout, CONSTANTS.expert_imbalance, again)


def kept_scores(kind: Kind, layout: Layout, row: int, width: int) -> int:
    """Numbers of `width` bytes that attention over chosen keys keeps per token, beside `kept_numbers`.

    Megarl has Megatron's plain-torch form of it (dsa.py:_unfused_absorbed_dsa_fn), with a score for every token of the
    row: its exponential and its probability in float32, the same probability of the operand's type, and three masks.
    """
    mixer = kind.layer.mixer
    return (11 + width) * mixer.heads * row // (width * layout.tp) if isinstance(mixer, IndexedAttention) else 0


def _scores_of_indexer(role: Role, kind: Kind) -> int:
    """Numbers per token that are there while it chooses: all scores in float32, before and after a step of them."""
    mixer = kind.layer.mixer
    return 8 * mixer.index_heads * role.max_tokens // role.width if isinstance(mixer, IndexedAttention) else 0


def kept_numbers(kind: Kind, hidden: int, layout: Layout, imbalance: float = 1.0, again: Collection[str] = ()) -> int:
    """Numbers that a layer of Transformer-Engine keeps per token: the operands of products, norms and attention.

    A gated feed-forward keeps 3 times its width: gate and up, which are one tensor, and their product, the input of the
    last linear.  So it is with Megatron's fused activation (mcore/models/fusions.py) and with our gate
    (mcore/models/pointwise.py).  One without a gate keeps 2 times its width.

    imbalance: tokens of a rank's experts, relative to a uniform distribution.  again: modules that are computed again,
    by Megatron's names.  Of the core attention that saves nothing: its operands and its output are those of others.
    """
    split = layout.tp if layout.sequence_parallel else 1
    inner, made, times = _mixer_kept(kind, layout.tp, again), kind.layer.feed_forward, kind.matrices
    if isinstance(made, Experts) and "moe" not in again:
        of_chosen = made.chosen * (2 * (made.latent or hidden) + (times - ("moe_act" in again)) * made.width)
        of_shared = 0 if "shared_experts" in again else times * made.shared
        inner += int(imbalance * of_chosen) + of_shared + made.count + (made.latent or 0)
    elif isinstance(made, FeedForward) and "mlp" not in again:
        inner += times * made.width
    norms = (1 if "layernorm" in again else 2) * hidden  # inputs, and outputs where these are not computed again
    return kind.layer.halves * norms // split + inner // layout.tp


def locally_kept(kind: Kind, hidden: int, layout: Layout, again: Collection[str] = ()) -> int:
    """The same of the local layers, counted tensor by tensor (test_measured_memory.py, test_saved_tensors.py).

    Latent attention was not measured; it is scaled like a standard layer, and its up projections save nothing when
    they are computed again: the local attention keeps copies of what they give.
    """
    split = layout.tp if layout.sequence_parallel else 1
    inner, made, routing = _locally_kept_of_mixer(kind, layout.tp), kind.layer.feed_forward, 0
    if isinstance(made, Experts) and "moe" not in again:
        each = (made.latent or hidden) + (kind.matrices + 1) * made.width  # also before an expert's share is applied
        inner += made.chosen * each + (made.latent or 0)
        inner += 0 if "shared_experts" in again else kind.matrices * made.shared
        routing = 12 * made.count
    elif isinstance(made, FeedForward) and "mlp" not in again:
        inner += kind.matrices * made.width
    norms = 3 if kind.gates_heads or type(kind.layer.mixer) is DeltaNet else 2  # zero-centred ones keep more
    return kind.layer.halves * (norms * hidden // split + 1) + inner // layout.tp + routing


def _mixer_kept(kind: Kind, tp: int, again: Collection[str] = ()) -> int:
    """Of all `tp` ranks, each of which has one head of keys and values or more."""
    mixer = kind.layer.mixer
    if isinstance(mixer, IndexedAttention):  # queries that meet latents; latents before and after their norms
        of_head = mixer.plain + 3 * mixer.rope + 2 * mixer.latent + mixer.value
        return mixer.heads * of_head + 2 * (mixer.latent + (mixer.query_latent or 0)) + mixer.rope
    if isinstance(mixer, LatentAttention):
        heads = 0 if "mla_up_proj" in again else mixer.heads * (2 * (mixer.plain + mixer.rope) + mixer.value)
        return heads + mixer.heads * mixer.value + mixer.latent + (mixer.query_latent or 0)
    if isinstance(mixer, Attention):
        times = 3 if kind.norms_heads else 2  # norms of queries and keys also keep their inputs
        gates = 2 if kind.gates_heads else 0  # a gate, and its product with the output
        return (times * (mixer.heads + max(mixer.pairs, tp)) + gates * mixer.heads) * mixer.size
    if isinstance(mixer, Mamba):  # the input projection's output; the scan's before its gate, behind it, and normalised
        return mixer.inputs + 3 * mixer.values * mixer.value
    if not isinstance(mixer, DeltaNet):
        return 0
    # The input projection's output; queries and keys divided by their lengths, and for each head of values again;
    # the values, the solved triangle, four numbers of decay and strength; the output, its gate, and their product.
    values = mixer.values * (2 * mixer.key + CHUNK + 4 + 4 * mixer.value)
    return mixer.inputs + 2 * mixer.keys * mixer.key + values


def _locally_kept_of_mixer(kind: Kind, tp: int) -> int:
    mixer = kind.layer.mixer
    if isinstance(mixer, IndexedAttention):
        return _mixer_kept(kind, tp)
    if isinstance(mixer, LatentAttention):
        return 3 * _mixer_kept(kind, tp) // 2
    if isinstance(mixer, Attention):
        heads, pairs, size = mixer.heads, max(mixer.pairs, tp), mixer.size
        inner = 3 * (heads + pairs) * size + 3 * size + heads  # angles of rope; a logarithm for each head
        inner += 4 * heads * size if kind.gates_heads else 0
        return inner + (heads * size + heads + pairs if kind.norms_heads else 0)
    if isinstance(mixer, Mamba):  # in plain torch (mcore/models/hybrid/mamba_kernels.py): for each tap, head and group
        of_head = 2 * CHUNK + 2 * mixer.key + 5 + mixer.key * mixer.value // CHUNK + 6 * mixer.value
        return mixer.inputs + (mixer.taps + 3) * mixer.channels + mixer.values * of_head + mixer.keys * (CHUNK + 1) + 6
    if not isinstance(mixer, DeltaNet):
        return 0
    # In plain torch (mcore/models/hybrid/delta_kernels.py): what each tap sees, and the matrices and states of chunks.
    values, key, value = mixer.values, mixer.key, mixer.value
    of_chunks = 23 * key // 2 + 5 * value + 5 * CHUNK + 5 + key * value // CHUNK
    of_output = 5 * value + 4  # with its norm and gate, decay and strength
    rest = 2 * mixer.keys * (key + 1) + 2  # lengths of queries and keys; places of tokens
    return mixer.inputs + mixer.taps * mixer.channels + values * (of_chunks + of_output) + rest


def _micro_batches_under_way(layout: Layout, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once, in units of all its layers (Megatron's 1F1B schedule)."""
    behind = layout.pp - stage
    if layout.vpp == 1:
        return behind
    return (2 * (behind - 1) + (layout.vpp - 1) * layout.pp + 1) / layout.vpp
