"""FLOPs and sizes of a model's parts per token, from a config.json: the basis of all predicted times.

linear      2 operations per parameter that the token uses: of experts only the chosen ones
attention   4 operations per key and head dimension (scores, and the sum of values), causal: half of the sequence
head        2 operations per number of the vocabulary's table
backward    twice the forward pass
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.layout import Layout, padded_vocab_size
from megarl.plan.memory.count import HFConfig, attention_size, expert_size, num_experts, of_layer, sparse_layers


@dataclass(frozen=True)
class Shape:
    """Per token, of the unsharded model."""

    hidden: int
    num_layers: int
    num_sparse: int  # layers with experts
    attention_params: int  # matrices of attention, and norms
    up_params: int  # those that make queries, keys and values of the latents of latent attention
    dense_params: int  # feed-forward of a layer without experts
    shared_params: int  # of a layer with experts: the router and the shared experts
    chosen_params: int  # the chosen experts
    expert_params: int  # all experts of a layer
    num_experts: int
    num_chosen: int
    key_flops: int  # attention's forward operations per key
    key_size: int  # numbers of a key and a value that a context-parallel ring sends
    cache_size: int  # numbers of a token in a layer's KV cache
    cache_parts: int  # ranks that can share these numbers; 1: every rank has all (the latent is common to all heads)
    head_params: int
    table_params: int  # the embedding and, if it is another table, the head

    def layer_params(self, sparse: bool) -> int:
        """Parameters of a layer that a token uses, without chosen experts."""
        return self.attention_params + (self.shared_params if sparse else self.dense_params)

    @property
    def active_params(self) -> int:
        """Parameters that a token uses, including the head, without the embedding."""
        sparse = self.num_sparse
        dense = self.num_layers - sparse
        layers = dense * self.layer_params(False) + sparse * (self.layer_params(True) + self.chosen_params)
        return layers + self.head_params


def shape_of(hf: HFConfig, role: str = "actor") -> Shape:
    """role: a critic has no vocabulary head."""
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
    pairs = hf.get("num_key_value_heads") or heads
    experts, chosen = num_experts(hf) or 0, (hf.get("num_experts_per_tok") or 0)
    dense = 3 * hidden * hf["intermediate_size"]
    if "kv_lora_rank" in hf:
        key, value = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"], hf["v_head_dim"]
        key_flops, key_size = 2 * heads * (key + value), heads * (key + value)
        up = heads * ((hf.get("q_lora_rank") or hidden) * key + hf["kv_lora_rank"] * (hf["qk_nope_head_dim"] + value))
        cache, parts = hf["kv_lora_rank"] + hf["qk_rope_head_dim"], 1
    else:
        size, up = attention_size(hf), 0
        key_flops, key_size, cache, parts = 4 * heads * size, 2 * pairs * size, 2 * pairs * size, pairs
    each = 3 * hidden * expert_size(hf) if experts else 0
    return Shape(
        hidden=hidden,
        num_layers=hf["num_hidden_layers"],
        num_sparse=sum(sparse_layers(hf)),
        attention_params=of_layer(hf, Layout(), sparse=False).dense - dense,
        up_params=up,
        dense_params=dense,
        shared_params=hidden * experts + each * (hf.get("n_shared_experts") or 0),
        chosen_params=chosen * each,
        expert_params=experts * each,
        num_experts=experts,
        num_chosen=chosen,
        key_flops=key_flops,
        key_size=key_size,
        cache_size=cache,
        cache_parts=parts,
        head_params=0 if role == "critic" else padded_vocab_size(hf["vocab_size"], 1) * hidden,
        table_params=hf["vocab_size"] * hidden * (1 if role == "critic" or hf.get("tie_word_embeddings") else 2),
    )


def forward_flops(shape: Shape, tokens: float, context: float) -> float:
    """FLOPs of a forward pass over `tokens` in sequences whose lengths have sum(l^2)/sum(l) = context."""
    return tokens * (2 * shape.active_params + shape.num_layers * shape.key_flops * context / 2)
