"""What the layers of a model are made of, by its config.json: one record for each layer, equal for those of one kind.

A layer has a mixer, through which tokens see those before them, and a feed-forward or experts.  A record has the facts
that follow from the sizes alone, of the unsharded model; parameters are in the table of weights (weights/count.py).
A new kind of mixer is a class here and an entry of MIXERS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

from megarl.arch.layout import ModelNumbers, layers_that_share, numbers_of

HFConfig = Mapping[str, Any]
# Kinds of layers that are one thing each, by transformers' names.
LINEAR, FULL, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
SHARED = "shared"  # transformers' name for a layer that takes over the keys which the layer before it chose
CHUNK = 64  # tokens that a kernel of the gated delta rule takes together (flash-linear-attention)


@dataclass(frozen=True)
class Mixer:
    """What a mixer costs beside its matrices.  This one, of a layer that has none, costs nothing."""

    def key_flops(self, context: float) -> float:  # noqa: ARG002
        """Forward operations of a token for the keys before it, in sequences with sum(l^2)/sum(l) = context."""
        return 0.0

    def choice_flops(self, context: float) -> float:  # noqa: ARG002
        """The same of those that choose keys, which have no backward pass."""
        return 0.0

    @property
    def token_flops(self) -> int:
        """Forward operations of a token, however long its sequence is."""
        return 0

    @property
    def cache_size(self) -> int:
        """Numbers of a token in a server's KV cache."""
        return 0

    def read_size(self, context: float) -> float:
        """Numbers of that cache which a server reads to generate a token after so many."""
        return context * self.cache_size

    @property
    def parts(self) -> int:
        """Ranks of a server that can share its cache and state; 1: every rank has all."""
        return 1

    def state_bytes(self, width: int) -> int:  # noqa: ARG002
        """Of a running completion in place of a cache; width: bytes of a number of the model."""
        return 0

    def sent(self, tp: int, cp: int) -> float:  # noqa: ARG002
        """Numbers of a token that a rank sends to those of its context in a forward pass."""
        return 0.0


@dataclass(frozen=True)
class Attention(Mixer):
    """Grouped-query attention: a key costs 2 operations a dimension for its score, and 2 for the sum of values."""

    heads: int
    pairs: int  # heads of keys and values
    size: int  # of a head

    @staticmethod
    def of(hf: HFConfig) -> Attention:
        heads = hf["num_attention_heads"]
        return Attention(
            heads, hf.get("num_key_value_heads") or heads, hf.get("head_dim") or hf["hidden_size"] // heads
        )

    def key_flops(self, context: float) -> float:
        return 4 * self.heads * self.size * context / 2

    @property
    def cache_size(self) -> int:
        return 2 * self.pairs * self.size

    @property
    def parts(self) -> int:
        return self.pairs

    def sent(self, tp: int, cp: int) -> float:
        """Keys and values of one head or more, round the ring."""
        return 2 * max(self.pairs, tp) * self.size / tp * (cp - 1)


@dataclass(frozen=True)
class LatentAttention(Mixer):
    """Multi-head latent attention, whose latent of keys and values is common to all heads."""

    heads: int
    query_latent: int | None
    latent: int
    plain: int  # of a query and a key, without position
    rope: int
    value: int

    @staticmethod
    def of(hf: HFConfig) -> LatentAttention:
        sizes = (hf[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        return LatentAttention(hf["num_attention_heads"], hf.get("q_lora_rank"), *sizes)

    def key_flops(self, context: float) -> float:
        return 2 * self.heads * (self.plain + self.rope + self.value) * context / 2

    @property
    def cache_size(self) -> int:
        return self.latent + self.rope

    def sent(self, tp: int, cp: int) -> float:
        """Keys and values of all heads, round the ring."""
        return self.heads * (self.plain + self.rope + self.value) / tp * (cp - 1)


@dataclass(frozen=True)
class IndexedAttention(LatentAttention):
    """Latent attention over the keys that an indexer chooses (DeepSeek-V3.2, arXiv:2512.02556, section 2.1).

    Queries of all heads meet the latents themselves, which are keys and values: so many operations cost their scores
    and their sums.  SGLang has the indexer's keys in its cache, in 8 bits with a scale in float32 for 128 numbers.
    """

    chosen: int  # keys of a token, at most
    index_heads: int  # of the indexer
    index_size: int  # of one of them, and of its key; both 0: a layer before has chosen

    @staticmethod
    def of(hf: HFConfig) -> IndexedAttention:
        sizes = (hf[name] for name in ("index_topk", "index_n_heads", "index_head_dim"))
        return IndexedAttention(*astuple(LatentAttention.of(hf)), *sizes)

    def key_flops(self, context: float) -> float:
        """The first tokens of a sequence have fewer keys than are chosen."""
        most = min(self.chosen, context)
        return 2 * self.heads * (2 * self.latent + self.rope) * (most - most**2 / max(2 * context, 1))

    def choice_flops(self, context: float) -> float:
        return 2 * self.index_heads * self.index_size * context / 2

    @property
    def cache_size(self) -> int:
        return self.latent + self.rope + self.index_size * 33 // 64

    def read_size(self, context: float) -> float:
        return context * self.cache_size - max(0, context - self.chosen) * (self.latent + self.rope)

    def sent(self, tp: int, cp: int) -> float:  # noqa: ARG002
        """Latents, and keys of the indexer, to all others (cp_comm_type=allgather)."""
        return (self.latent + self.rope + self.index_size) * (cp - 1)


@dataclass(frozen=True)
class DeltaNet(Mixer):
    """A gated delta net (arXiv:2412.06464): each head of values has a state [key, value], and a convolution before."""

    keys: int  # heads of queries, and of keys
    values: int  # heads of values
    key: int  # of a head
    value: int
    taps: int  # of the convolution

    @staticmethod
    def of(hf: HFConfig) -> DeltaNet:
        sizes = (*("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"), "conv_kernel_dim")
        return DeltaNet(*(hf[f"linear_{name}"] for name in sizes))

    @property
    def channels(self) -> int:
        """Queries, keys and values of a token, over which the convolution goes."""
        return 2 * self.keys * self.key + self.values * self.value

    @property
    def inputs(self) -> int:
        """Those, a gate for each value, and decay and strength of each head of values."""
        return self.channels + self.values * (self.value + 2)

    @property
    def token_flops(self) -> int:
        """The convolution, and the rule in chunks of C tokens (arXiv:2406.06484, section 3.2).

        For each head of values and token, with k and v the sizes of a key and a value: 2 C k each for the scores of
        keys with keys and of queries with keys, C^2 / 3 for the inverse of a triangle, 2 C k and 2 C v for its
        products with keys and values, 2 C v for those of the scores with values, and 2 k v each for what the state
        has of the keys, for its update, and for what the queries read of it.
        """
        k, v = self.key, self.value
        each = CHUNK * (6 * k + 4 * v) + CHUNK**2 // 3 + 6 * k * v
        return self.values * each + 2 * self.taps * self.channels

    @property
    def parts(self) -> int:
        return self.keys

    def state_bytes(self, width: int) -> int:
        """A state in float32, and the inputs that the convolution still needs."""
        return 4 * self.values * self.key * self.value + width * (self.taps - 1) * self.channels

    def sent(self, tp: int, cp: int) -> float:
        """Ranks exchange tokens for heads, and the output back."""
        return (self.inputs + self.values * self.value) / tp * (cp - 1) / cp


@dataclass(frozen=True)
class Mamba(DeltaNet):
    """Mamba-2 (arXiv:2405.21060): C are queries of a group of heads, B its keys and x the values, without a delta rule.

    Its convolution has a bias, and is counted among the matrices.
    """

    chunk: int  # tokens that a kernel takes together

    @staticmethod
    def of(hf: HFConfig) -> Mamba:
        names = ("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel", "chunk_size")
        return Mamba(*(hf[name] for name in names))

    @property
    def inputs(self) -> int:
        """B, C and x, a gate for each of x, and a step for each head."""
        return self.channels + self.values * (self.value + 1)

    @property
    def token_flops(self) -> int:
        """The scan in chunks of Q tokens (arXiv:2405.21060, section 6), with N and P the sizes of a key and a value.

        For each token: 2 Q N for the scores of C with B, of a group; of each head 2 Q P for their products with x, and
        2 N P each for the update of the state and for what C reads of it.
        """
        of_head = 2 * self.chunk * self.value + 4 * self.key * self.value
        return 2 * self.keys * self.chunk * self.key + self.values * of_head


@dataclass(frozen=True)
class FeedForward:
    """Gate, if it has one, up and down."""

    width: int


@dataclass(frozen=True)
class Experts:
    """A router, experts, which are feed-forwards, and one more feed-forward for all tokens."""

    count: int
    chosen: int  # of a token
    width: int  # of one
    shared: int  # width of the shared experts together
    latent: int | None = None  # size of what routed ones see in place of the hidden state


@dataclass(frozen=True)
class Layer:
    """Example: Layer(Attention(32, 8, 128), FeedForward(14336)), each of the 32 layers of Llama 3.1 8B."""

    mixer: Mixer  # `Mixer()` in a layer that is a feed-forward or experts alone
    feed_forward: FeedForward | Experts | None

    @property
    def halves(self) -> int:
        """Of its two: a mixer and a feed-forward or experts, each with a norm and a residual connection."""
        return (self.mixer != Mixer()) + (self.feed_forward is not None)

    @property
    def experts(self) -> Experts | None:
        return self.feed_forward if isinstance(self.feed_forward, Experts) else None


def _attention(hf: HFConfig) -> Mixer:
    return LatentAttention.of(hf) if hf.get("kv_lora_rank") else Attention.of(hf)


# By transformers' names in layer_types, or in layers_block_type.
MIXERS: dict[str, Callable[[HFConfig], Mixer]] = {
    **dict.fromkeys((FULL, "sliding_attention"), _attention),
    LINEAR: lambda hf: (Mamba if hf.get("mamba_num_heads") else DeltaNet).of(hf),
    "indexed_attention": IndexedAttention.of,
    SHARED: lambda hf: replace(IndexedAttention.of(hf), index_heads=0, index_size=0),
    **dict.fromkeys((MLP, EXPERTS), lambda hf: Mixer()),  # noqa: ARG005
}


def layers_of(hf: HFConfig) -> tuple[Layer, ...]:
    """A record for each layer.

    Raises: KeyError for a number that config.json does not have; ValueError of one sentence for a kind of layer of
    which it is not known here what it costs.
    """
    shares = (hf.get("index_topk_freq") or 1) > 1
    for key, is_needed in (("layer_types", hf.get("index_topk")), ("indexer_types", shares)):
        if is_needed and not hf.get(key):  # transformers' class makes it of a folder's numbers, but not of typed ones
            raise ValueError(f"config.json: {key} is missing; expected a word for each layer, as its indexers want it")
    numbers, sharing = numbers_of(hf), layers_that_share(hf)
    kinds = hf.get("layers_block_type") or hf.get("layer_types") or (FULL,) * hf["num_hidden_layers"]
    kinds = [SHARED if at in sharing else kind for at, kind in enumerate(kinds)]
    if unknown := sorted(set(kinds) - MIXERS.keys()):
        raise ValueError(f"config.json: the planner does not know layers of the kind {unknown[0]} yet")
    mixers = {kind: MIXERS[kind](hf) for kind in set(kinds)}
    return tuple(Layer(mixers[kind], _feed_forward(hf, numbers, at, kind)) for at, kind in enumerate(kinds))


def _feed_forward(hf: HFConfig, numbers: ModelNumbers, layer: int, kind: str) -> FeedForward | Experts | None:
    if hf.get("layers_block_type") and kind not in (MLP, EXPERTS):
        return None
    if not numbers.num_experts or layer in numbers.dense_layers:
        return FeedForward(hf["intermediate_size"])
    width, shared = numbers.expert_intermediate_size or 0, numbers.shared_intermediate_size or 0
    return Experts(numbers.num_experts, hf["num_experts_per_tok"], width, shared, hf.get("moe_latent_size"))
