"""The parallel layout of a model over the ranks of a group, and whether it fits: numbers only, no torch, no Megatron.

The configuration checks it before a process starts, and `mcore` again before it builds a model, with the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from megarl.arch.mtp import TRAINED_MTP

# A key of config.json; if true, the folder has no weights, and models keep Megatron's random initialisation from the
# run's seed.  For benchmarks only: no published model has it.
RANDOM_WEIGHTS = "megarl_random_weights"


@dataclass(frozen=True)
class Layout:
    """The parallel sizes of one model in a group; the data-parallel size is the number of ranks / (tp*pp*cp).

    Dense layers use the tp*cp*dp ranks of a pipeline stage.  The experts of the same layers use the same ranks in
    another way: split over `etp`, distributed over `ep`, replicated over the rest.  So expert parallelism adds no
    ranks: it uses those of tensor, context and data parallelism, and the data of a step is split as without it.
    """

    tp: int = 1  # tensor parallel
    pp: int = 1  # pipeline parallel
    cp: int = 1  # context parallel
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    ep: int = 1  # expert parallel
    etp: int | None = None  # tensor parallel inside an expert; None: equal to tp
    vpp: int = 1  # interleaved stages of each pipeline rank
    first_stage_layers: int | None = None  # layers of the first pipeline rank; None: as many as the others
    last_stage_layers: int | None = None  # the same for the last

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def model_size(self) -> int:
        """Ranks of one data-parallel replica; experts may be distributed over several replicas."""
        return self.tp * self.pp * self.cp

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas among which the sequences of a step are split.  Raises ValueError if a size does not divide."""
        if misfit := next(rank_misfits(self, world_size), None):
            raise ValueError(misfit.sentence)
        return world_size // self.model_size

    def stage_layers(self, num_layers: int) -> list[int]:
        """Layers of each pipeline rank, over all its interleaved stages.

        Example: Layout(pp=4, last_stage_layers=13).stage_layers(61) -> [16, 16, 16, 13].
        """
        own = (self.first_stage_layers, *[None] * (self.pp - 2), self.last_stage_layers) if self.pp > 1 else (None,)
        even = own.count(None)
        left = num_layers - sum(layers or 0 for layers in own)
        return [left // even if layers is None else layers for layers in own]

    def layers_per_chunk(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each model chunk in order; chunk i is on pipeline rank i % pp.  Raises ValueError for a misfit.

        Example: Layout(pp=2, vpp=2, last_stage_layers=2).layers_per_chunk(6) -> (2, 1, 2, 1).
        """
        if misfit := next(misfits(ModelNumbers(num_hidden_layers=num_layers), replace(self, ep=1, etp=None)), None):
            raise ValueError(misfit.sentence)
        return tuple(layers // self.vpp for layers in self.stage_layers(num_layers)) * self.vpp


# fields of Layout -> keys of a role's `megatron` group, which have Megatron's names
KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "use_distributed_optimizer": "use_distributed_optimizer",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "first_stage_layers": "num_layers_in_first_pipeline_stage",
    "last_stage_layers": "num_layers_in_last_pipeline_stage",
}


@dataclass(frozen=True)
class ModelNumbers:
    """Sizes of a model that a layout must fit, named as in Hugging Face's config.json; None: unknown or not present."""

    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None  # of dense layers
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    expert_intermediate_size: int | None = None  # of one expert
    shared_intermediate_size: int | None = None  # of all shared experts together
    linear_num_key_heads: int | None = None  # of gated delta nets, each of which serves as many heads of values
    mamba_num_heads: int | None = None
    n_groups: int | None = None  # of Mamba's heads, each of which has one B and one C
    q_lora_rank: int | None = None  # multi-latent attention: size of the latent of queries
    kv_latent_size: int | None = None  # and of keys and values, with the rotary part
    dense_layers: tuple[int, ...] = ()  # in a model with experts, the layers without experts, from 0
    layers_that_share: tuple[int, ...] = ()  # the keys which the layer before them chose, from 0
    has_indexers: bool = False  # layers choose the keys to which a token attends
    has_biased_experts: bool = False
    has_norms_of_all_heads: bool = False  # each tensor-parallel rank has the weights of its own heads
    exchanges_heads: bool = False  # under context parallelism: see `exchange_misfits`


# Of models whose layers are one thing each: the kind of layer without which a number means nothing.
_OF_KIND = {"intermediate_size": "mlp", "n_routed_experts": "moe", "moe_shared_expert_intermediate_size": "moe"}


def numbers_of(hf: Mapping[str, Any]) -> ModelNumbers:
    """The numbers in a config.json, which may be incomplete."""
    if kinds := hf.get("layers_block_type"):
        hf = {key: value for key, value in hf.items() if key not in _OF_KIND or _OF_KIND[key] in kinds}
    experts = _first(hf, "num_experts", "num_local_experts", "n_routed_experts")
    expert_size = _first(hf, "moe_intermediate_size", "intermediate_size") if experts else None
    shared, latent = hf.get("n_shared_experts"), hf.get("kv_lora_rank")
    return ModelNumbers(
        num_hidden_layers=hf.get("num_hidden_layers"),
        num_attention_heads=hf.get("num_attention_heads"),
        num_key_value_heads=_first(hf, "num_key_value_heads", "num_attention_heads"),
        hidden_size=hf.get("hidden_size"),
        intermediate_size=hf.get("intermediate_size"),
        vocab_size=hf.get("vocab_size"),
        max_position_embeddings=_longest(hf),
        num_experts=experts,
        num_experts_per_tok=hf.get("num_experts_per_tok") if experts else None,
        expert_intermediate_size=expert_size,
        shared_intermediate_size=_first(hf, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
        or (expert_size * shared if expert_size and shared else None),
        linear_num_key_heads=hf.get("linear_num_key_heads"),
        mamba_num_heads=hf.get("mamba_num_heads"),
        n_groups=hf.get("n_groups") if hf.get("mamba_num_heads") else None,
        q_lora_rank=hf.get("q_lora_rank"),
        kv_latent_size=latent + (hf.get("qk_rope_head_dim") or 0) if latent else None,
        dense_layers=dense_layers(hf) if experts else (),
        layers_that_share=layers_that_share(hf),
        has_indexers=hf.get("index_topk") is not None,
        has_norms_of_all_heads=hf.get("model_type") == "minimax_m2",
        has_biased_experts=hf.get("model_type") == "gpt_oss",
        exchanges_heads=hf.get("model_type") in ("gpt_oss", "mistral") and hf.get("sliding_window") is not None,
    )


def dense_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers without experts: those that are said to be something else, the first of DeepSeek-V3, and Qwen3-MoE's
    mlp_only_layers and decoder_sparse_step."""
    if kinds := hf.get("mlp_layer_types"):
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    if kinds := hf.get("layers_block_type"):
        return tuple(layer for layer, kind in enumerate(kinds) if kind != "moe")
    first, step = hf.get("first_k_dense_replace") or 0, hf.get("decoder_sparse_step") or 1
    named, layers = hf.get("mlp_only_layers") or (), range(hf.get("num_hidden_layers") or 0)
    return tuple(i for i in layers if i < first or (i + 1) % step or i in named)


def layers_that_share(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers that take over the keys which the layer before them chose: GLM-5's without an indexer."""
    kinds = (hf.get("indexer_types") or ())[: hf.get("num_hidden_layers")]
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "shared")


def _longest(hf: Mapping[str, Any]) -> int | None:
    """Maximum positions of the model; a scaled rope may extend those of its pretraining."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    taught, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    known = hf.get("max_position_embeddings")
    return max(known, int(taught * factor)) if known and taught and factor else known


def _first(hf: Mapping[str, Any], *names: str) -> Any:
    return next((hf[name] for name in names if hf.get(name) is not None), None)


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Megatron splits the vocabulary into tp equal parts; 8 rows each keep bf16 matrix products aligned."""
    return -(-vocab_size // (8 * tp)) * 8 * tp


class Misfit(NamedTuple):
    """A value that does not fit: the field of Layout, and a sentence that begins with its key."""

    field: str
    sentence: str


# (field of the layout, field of the numbers that it must divide, what config.json calls it)
_DIVIDES = (
    ("tp", "num_attention_heads", "num_attention_heads"),
    ("tp", "intermediate_size", "intermediate_size"),
    ("tp", "n_groups", "n_groups"),
    ("tp", "q_lora_rank", "q_lora_rank"),
    ("tp", "kv_latent_size", "kv_lora_rank + qk_rope_head_dim"),
    ("tp", "shared_intermediate_size", "intermediate size of shared experts"),
    ("ep", "num_experts", "number of experts"),
    ("expert_tp", "expert_intermediate_size", "intermediate size of an expert"),
)


def misfits(numbers: ModelNumbers, layout: Layout) -> Iterator[Misfit]:
    """All reasons why a model does not fit a layout.  Unknown sizes of the model are not checked."""
    if wrong := list(_own_misfits(layout)):  # sizes may be 0, and are divisors below
        yield from wrong
        return
    if not numbers.num_experts and numbers.num_hidden_layers is not None:
        yield from _without_experts(layout)
    for axis, name, called in _DIVIDES:
        size, whole = getattr(layout, axis), getattr(numbers, name)
        if whole is not None and whole % size:
            field = ("tp" if layout.etp is None else "etp") if axis == "expert_tp" else axis
            yield Misfit(field, f"{KEYS[field]}={size} does not divide the model's {called}={whole}")
    heads = numbers.num_key_value_heads
    if heads is not None and heads % layout.tp and (layout.tp % heads or numbers.has_norms_of_all_heads):
        shared = "" if numbers.has_norms_of_all_heads else ", nor is a multiple of it"
        neither = "does not divide" if numbers.has_norms_of_all_heads else "neither divides"
        yield Misfit("tp", f"{KEYS['tp']}={layout.tp} {neither} the model's num_key_value_heads={heads}{shared}")
    linear, size = numbers.linear_num_key_heads, layout.tp * layout.cp
    if linear is not None and linear % size:
        said = f"{KEYS['tp']}={layout.tp} times {KEYS['cp']}={layout.cp}"
        yield Misfit("tp", f"{said} does not divide the model's linear_num_key_heads={linear}")
    yield from _mamba_misfits(numbers, layout)
    if numbers.has_biased_experts and layout.expert_tp > 1:
        whole = "Megatron-Core does not cut experts with biases"
        yield Misfit("etp", f"{KEYS['etp']}={layout.expert_tp}: {whole}; expected 1")
    if numbers.has_indexers and layout.tp > 1 and not layout.sequence_parallel:
        whole = "Megatron-Core's sparse attention needs parts of sequences"
        with_tp = f"{whole} with {KEYS['tp']}={layout.tp}"
        yield Misfit("sequence_parallel", f"sequence_parallel=false: {with_tp}; expected true")
    if numbers.num_hidden_layers is not None:
        wrong = list(_layer_misfits(layout, numbers.num_hidden_layers))
        yield from wrong or sharing_misfits(layout, numbers.num_hidden_layers, numbers.layers_that_share)


def _mamba_misfits(numbers: ModelNumbers, layout: Layout) -> Iterator[Misfit]:
    """Of context-parallel ranks, which share out the heads of the groups that a tensor-parallel rank has."""
    groups, heads = numbers.n_groups, numbers.mamba_num_heads
    if groups is None or heads is None or groups % layout.tp:  # which was said
        return
    said, left = f"{KEYS['tp']}={layout.tp} times {KEYS['cp']}={layout.cp}", groups // layout.tp
    if heads % (layout.tp * layout.cp):
        yield Misfit("cp", f"{said} does not divide the model's mamba_num_heads={heads}")
    elif left % layout.cp and layout.cp % left:
        held = f"a tensor-parallel rank has {left} of the model's n_groups={groups}"
        yield Misfit("cp", f"{KEYS['cp']}={layout.cp}: {held}; expected a divisor or a multiple of {left}")


def training_misfits(numbers: ModelNumbers, layout: Layout) -> Iterator[Misfit]:
    """Misfits of training only, of models with experts.

    With ep = 1 Megatron reduces their gradients over the replicas of dense layers (`allreduce` of their weights), so
    these must be theirs too.  With ep > 1 they have their own optimizer, so each pipeline rank needs some.
    """
    if not numbers.num_experts or numbers.num_hidden_layers is None:
        return
    if layout.ep == 1:
        if layout.expert_tp != layout.tp:
            untrained = f"experts are not trained with it and {KEYS['ep']}=1; expected {layout.tp}, as {KEYS['tp']}"
            untrained += f", or {KEYS['ep']} above 1"
            yield Misfit("etp", f"{KEYS['etp']}={layout.expert_tp}: {untrained}")
        return
    chunks = layout.layers_per_chunk(numbers.num_hidden_layers)
    first = 0
    have = [False] * layout.pp
    for index, count in enumerate(chunks):
        have[index % layout.pp] |= any(layer not in numbers.dense_layers for layer in range(first, first + count))
        first += count
    if not all(have):
        held = f"stage {have.index(False)} would hold no experts, which {KEYS['ep']}={layout.ep} does not train"
        yield Misfit("pp", f"{KEYS['pp']}={layout.pp}: {held}; expected fewer stages, or 1")


def exchange_misfits(numbers: ModelNumbers, layout: Layout) -> Iterator[Misfit]:
    """Misfits on GPUs only, of models with windows or attention sinks, for which Transformer Engine has no ring.

    Context-parallel ranks then exchange heads (cp_comm_type=a2a): each attends with some of them over whole rows.
    """
    heads = numbers.num_key_value_heads
    if numbers.exchanges_heads and heads is not None and (own := max(1, heads // layout.tp)) % layout.cp:
        cut = "windows and attention sinks are computed for whole rows of some heads"
        held = f"a tensor-parallel rank has {own} of keys and values"
        yield Misfit("cp", f"{KEYS['cp']}={layout.cp}: on GPUs {cut}, and {held}; expected a divisor of them")


def _without_experts(layout: Layout) -> Iterator[Misfit]:
    if layout.ep > 1:
        yield Misfit("ep", f"{KEYS['ep']}={layout.ep}: the model has no experts; expected 1")
    if layout.etp is not None and layout.etp != layout.tp:
        yield Misfit(
            "etp", f"{KEYS['etp']}={layout.etp}: the model has no experts; expected {layout.tp}, as {KEYS['tp']}"
        )


def _own_misfits(layout: Layout) -> Iterator[Misfit]:
    """Misfits of the layout itself, for any model."""
    for field in KEYS:
        size = getattr(layout, field)
        if size is not None and not isinstance(size, bool) and size < 1:
            yield Misfit(field, f"{KEYS[field]}={size}: expected at least 1")
    if layout.pp == 1:
        for field, neutral in (("vpp", 1), ("first_stage_layers", None), ("last_stage_layers", None)):
            if (size := getattr(layout, field)) != neutral:
                wanted = f"expected {KEYS['pp']} above 1, or {'null or 1' if neutral else 'null'}"
                yield Misfit(field, f"{KEYS[field]}={size}: there is one pipeline rank; {wanted}")
    if layout.sequence_parallel and layout.tp == 1:
        yield Misfit("sequence_parallel", f"sequence_parallel=true: expected {KEYS['tp']} above 1, or false")


def _layer_misfits(layout: Layout, num_layers: int) -> Iterator[Misfit]:
    layers = f"the model's num_hidden_layers={num_layers}"
    uneven = [field for field in ("first_stage_layers", "last_stage_layers") if getattr(layout, field) is not None]
    if not uneven:
        if num_layers % layout.pp:
            yield Misfit("pp", f"{KEYS['pp']}={layout.pp} does not divide {layers}")
        elif num_layers // layout.pp % layout.vpp:
            each = f"the {num_layers // layout.pp} layers of a pipeline rank"
            yield Misfit("vpp", f"{KEYS['vpp']}={layout.vpp} does not divide {each}")
        return
    taken, stages = sum(getattr(layout, field) for field in uneven), layout.pp - len(uneven)
    said = " and ".join(f"{KEYS[field]}={getattr(layout, field)}" for field in uneven)
    left = num_layers - taken
    if stages == 0 and left:
        yield Misfit(uneven[0], f"{said} are {taken} layers on both pipeline ranks; expected {layers}")
    elif stages and (left < stages or left % stages):
        others = f"the other {stages} pipeline ranks" if stages > 1 else "the other pipeline rank"
        wanted = "a multiple of their number" if stages > 1 else "at least 1"
        yield Misfit(uneven[0], f"{said}: {left} of {layers} are left for {others}; expected {wanted}")
    else:
        for size in sorted(set(layout.stage_layers(num_layers))):
            if size % layout.vpp:
                yield Misfit("vpp", f"{KEYS['vpp']}={layout.vpp} does not divide the {size} layers of a pipeline rank")
                return


def sharing_misfits(layout: Layout, num_layers: int, sharing: tuple[int, ...]) -> Iterator[Misfit]:
    """Of layers that take over chosen keys, which they get inside a chunk only: each chunk begins with another."""
    if not sharing:
        return
    starts = [0, *accumulate(layout.layers_per_chunk(num_layers))][:-1]
    if wrong := sorted(set(starts).intersection(sharing)):
        held = f"a chunk would begin with layer {wrong[0] + 1} of {num_layers}, which takes over the keys chosen before"
        field = "vpp" if layout.vpp > 1 else "pp"
        yield Misfit(field, f"{KEYS[field]}={getattr(layout, field)}: {held} it; expected one that chooses its own")


def has_states(hf: Mapping[str, Any]) -> bool:
    """Whether some layers of a config.json carry a state along a sequence, or choose keys in it by an indexer."""
    kinds = hf.get("layer_types") or hf.get("layers_block_type") or ()
    return not {"linear_attention", "indexed_attention"}.isdisjoint(kinds)


def can_share_prefixes(hf: Mapping[str, Any], layout: Layout, *, router_replay: bool, transformer_engine: bool) -> bool:
    """Whether ranks in this layout can compute once what rows begin with in common.

    Not layers with states or indexers, whose rows have no trees, and not MTP layers, which read the one token that
    follows.  `transformer_engine`: layers are Transformer-Engine's, whose attention takes no trees either.
    """
    return layout.cp == 1 and not (router_replay or transformer_engine or has_states(hf) or TRAINED_MTP in hf)


def shares_prefixes(asked: str, role: str, device: str, *, can_share: bool) -> bool:
    """Whether a role's ranks do so, for trainer.share_prefixes=`asked`: auto | on | off, and device: cpu | cuda.

    `auto` does it on CPUs alone: on GPUs what it saves was not measured.
    Raises: ValueError for `on` where they cannot.
    """
    if asked == "on" and not can_share:
        raise ValueError(f"trainer.share_prefixes=on: the ranks of {role} cannot; expected auto or off")
    return can_share and (asked == "on" or (asked == "auto" and device == "cpu"))


def rank_misfits(layout: Layout, num_ranks: int) -> Iterator[Misfit]:
    """Products of sizes that do not divide the number of ranks; these sentences do not begin with a key."""
    for name, sizes, fields in (
        ("tp*pp*cp", (layout.tp, layout.pp, layout.cp), ("tp", "pp", "cp")),
        ("ep*etp*pp", (layout.ep, layout.expert_tp, layout.pp), ("ep", "tp" if layout.etp is None else "etp", "pp")),
    ):
        product = sizes[0] * sizes[1] * sizes[2]
        if num_ranks % product:
            spelt = "*".join(str(size) for size in sizes)
            field = fields[sizes.index(max(sizes))]
            yield Misfit(field, f"{name} = {spelt} = {product} does not divide {num_ranks} ranks")
