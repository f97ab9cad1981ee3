"""What the layers of a model are made of, by its config.json: one record for each layer, equal for those of one kind.

A layer has a mixer, through which tokens see those before them, and a feed-forward or experts.  A record has the facts
that follow from the sizes alone, of the unsharded model; parameters are in the table of weights (weights/count.py).
A new kind of mixer is a class here and an entry of MIXERS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.arch.layout import numbers_of

HFConfig = Mapping[str, Any]
# Kinds of layers that are one thing each, by transformers' names.
LINEAR, FULL, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
CHUNK = 64  # tokens that a kernel of the gated delta rule takes together (flash-linear-attention)


class Mixer(Protocol):
    """What a mixer costs beside its matrices."""

    @property
    def key_flops(self) -> int:
        """Forward operations of a token for each key."""

    @property
    def token_flops(self) -> int:
        """Forward operations of a token, however long its sequence is."""

    @property
    def cache_size(self) -> int:
        """Numbers of a token in a server's KV cache."""

    @property
    def parts(self) -> int:
        """Ranks of a server that can share its cache and state; 1: every rank has all."""

    def state_bytes(self, width: int) -> int:
        """Of a running completion in place of a cache; width: bytes of a number of the model."""

    def sent(self, tp: int, cp: int) -> float:
        """Numbers of a token that a rank sends to those of its context in a forward pass."""


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention: a key costs 2 operations a dimension for its score, and 2 for the sum of values."""

    heads: int
    pairs: int  # heads of keys and values
    size: int  # of a head
    token_flops: int = 0

    @staticmethod
    def of(hf: HFConfig) -> Attention:
        heads = hf["num_attention_heads"]
        return Attention(
            heads, hf.get("num_key_value_heads") or heads, hf.get("head_dim") or hf["hidden_size"] // heads
        )

    @property
    def key_flops(self) -> int:
        return 4 * self.heads * self.size

    @property
    def cache_size(self) -> int:
        return 2 * self.pairs * self.size

    @property
    def parts(self) -> int:
        return self.pairs

    def state_bytes(self, width: int) -> int:  # noqa: ARG002
        return 0

    def sent(self, tp: int, cp: int) -> float:
        """Keys and values of one head or more, round the ring."""
        return 2 * max(self.pairs, tp) * self.size / tp * (cp - 1)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention, whose latent of keys and values is common to all heads."""

    heads: int
    query_latent: int | None
    latent: int
    plain: int  # of a query and a key, without position
    rope: int
    value: int
    token_flops: int = 0
    parts: int = 1

    @staticmethod
    def of(hf: HFConfig) -> LatentAttention:
        sizes = (hf[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        return LatentAttention(hf["num_attention_heads"], hf.get("q_lora_rank"), *sizes)

    @property
    def key_flops(self) -> int:
        return 2 * self.heads * (self.plain + self.rope + self.value)

    @property
    def cache_size(self) -> int:
        return self.latent + self.rope

    def state_bytes(self, width: int) -> int:  # noqa: ARG002
        return 0

    def sent(self, tp: int, cp: int) -> float:
        """Keys and values of all heads, round the ring."""
        return self.heads * (self.plain + self.rope + self.value) / tp * (cp - 1)


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net (arXiv:2412.06464): each head of values has a state [key, value], and a convolution before."""

    keys: int  # heads of queries, and of keys
    values: int  # heads of values
    key: int  # of a head
    value: int
    taps: int  # of the convolution
    key_flops: int = 0
    cache_size: int = 0

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
class FeedForward:
    """Gate, up and down."""

    width: int


@dataclass(frozen=True)
class Experts:
    """A router, experts with gate, up and down, and one more feed-forward for all tokens."""

    count: int
    chosen: int  # of a token
    width: int  # of one
    shared: int  # width of the shared experts together


@dataclass(frozen=True)
class Layer:
    """Example: Layer(Attention(32, 8, 128), FeedForward(14336)), each of the 32 layers of Llama 3.1 8B."""

    mixer: Attention | LatentAttention | DeltaNet
    feed_forward: FeedForward | Experts

    @property
    def experts(self) -> Experts | None:
        return self.feed_forward if isinstance(self.feed_forward, Experts) else None


def _attention(hf: HFConfig) -> Attention | LatentAttention:
    return LatentAttention.of(hf) if hf.get("kv_lora_rank") else Attention.of(hf)


# By transformers' names in layer_types.
MIXERS = {"full_attention": _attention, "sliding_attention": _attention, "linear_attention": DeltaNet.of}


def layers_of(hf: HFConfig) -> tuple[Layer, ...]:
    """A record for each layer.

    Raises: KeyError for a number that config.json does not have; ValueError of one sentence for a kind of layer of
    which it is not known here what it costs.
    """
    numbers = numbers_of(hf)
    if hf.get("layers_block_type"):
        raise ValueError(
            "config.json: the planner does not know layers that are one thing each (layers_block_type) yet"
        )
    kinds = hf.get("layer_types") or ("full_attention",) * hf["num_hidden_layers"]
    if unknown := sorted(set(kinds) - MIXERS.keys()):
        raise ValueError(f"config.json: the planner does not know layers of the kind {unknown[0]} yet")
    mixers = {kind: MIXERS[kind](hf) for kind in set(kinds)}
    layers = []
    for layer, kind in enumerate(kinds):
        if numbers.num_experts and layer not in numbers.dense_layers:
            width, shared = numbers.expert_intermediate_size or 0, numbers.shared_intermediate_size or 0
            experts = Experts(numbers.num_experts, hf["num_experts_per_tok"], width, shared)
            layers.append(Layer(mixers[kind], experts))
        else:
            layers.append(Layer(mixers[kind], FeedForward(hf["intermediate_size"])))
    return tuple(layers)
