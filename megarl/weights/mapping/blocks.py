"""The blocks that decoders are built of, as mappings: attention, feed-forwards, experts, embedding and head.

`families.py` puts them together; nothing here knows the name of a model family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from megarl.arch.mtp import TRAINED_MTP
from megarl.weights.mapping.names import QKV, GatedQKV, GateUp, Op, Rename, ValueHead, Vocab
from megarl.weights.mapping.stacks import Stack

HFConfig = Mapping[str, Any]
Role = Literal["actor", "critic"]
QKNorm = Literal["head", "all heads"]
GATED = ("gate_proj", "up_proj", "down_proj")  # the usual HF names of a gated feed-forward's linears


def is_tied(hf_config: HFConfig) -> bool:
    """Whether the output rows are the embedding's own."""
    return bool(hf_config.get("tie_word_embeddings", False))


def decoder(c: HFConfig, role: Role, vocab_multiple: int, layers: Iterable[Op], *, names: tuple[str, str]) -> list[Op]:
    """Embedding, layers, final norm, and the head of the role; `names`: the HF names of embedding and norm."""
    hidden = c["hidden_size"]
    name = "embedding.word_embeddings.weight"
    # Of the last stage, if it is not the first: MTP layers have the embedding there, which is then also a tied head.
    tied_copy = ("output_layer.weight",) if is_tied(c) and role == "actor" else ()
    copies = (name,) if TRAINED_MTP in c else tied_copy
    embedding = Vocab(name, f"{names[0]}.weight", c["vocab_size"], hidden, vocab_multiple, copies=copies)
    final_norm = Rename("decoder.final_layernorm.weight", f"{names[1]}.weight", (hidden,))
    head: list[Op] = []
    if role == "critic":
        head = [ValueHead("output_layer.weight", "score.weight", (1, hidden))]
    elif not is_tied(c):
        head = [Vocab("output_layer.weight", "lm_head.weight", c["vocab_size"], hidden, vocab_multiple)]
    return [embedding, *layers, final_norm, *head]


def attention(
    c: HFConfig,
    layer: int,
    *,
    qkv_bias: bool = False,
    qk_norm: QKNorm | None = None,
    output_bias: bool = False,
    sinks: bool = False,
    gated: bool = False,
) -> list[Op]:
    """Grouped-query attention with the norm before it.

    `qk_norm`: q and k are normalised, each head by itself with a weight that its heads share, or all heads at once.
    `sinks`: each head has a score beside those of the keys.  `gated`: each head's output is scaled by a gate, whose
    rows are in q_proj.
    """
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    groups = c.get("num_key_value_heads") or heads
    head_dim = c.get("head_dim") or hidden // heads
    hf, mg = f"model.layers.{layer}", f"decoder.layers.{layer}"
    attn, mg_attn = f"{hf}.self_attn", f"{mg}.self_attention"

    def qkv(kind: str, width: int | None) -> QKV:
        q, k, v = (f"{attn}.{x}_proj.{kind}" for x in "qkv")
        kind_of = GatedQKV if gated else QKV
        return kind_of(f"{mg_attn}.linear_qkv.{kind}", q, k, v, heads, groups, head_dim, width)

    ops: list[Op] = [
        Rename(f"{mg}.input_layernorm.weight", f"{hf}.input_layernorm.weight", (hidden,)),
        qkv("weight", hidden),
    ]
    if qkv_bias:
        ops.append(qkv("bias", None))
    for x, count in (("q", heads), ("k", groups)) if qk_norm else ():
        size, dim = (head_dim, None) if qk_norm == "head" else (count * head_dim, 0)
        ops.append(Rename(f"{mg_attn}.{x}_layernorm.weight", f"{attn}.{x}_norm.weight", (size,), dim))
    ops.append(Rename(f"{mg_attn}.linear_proj.weight", f"{attn}.o_proj.weight", (hidden, heads * head_dim), 1))
    if output_bias:
        ops.append(Rename(f"{mg_attn}.linear_proj.bias", f"{attn}.o_proj.bias", (hidden,)))
    if sinks:
        ops.append(Rename(f"{mg_attn}.core_attention.softmax_offset", f"{attn}.sinks", (heads,), 0))
    return ops


def latent_attention(c: HFConfig, layer: int) -> list[Op]:
    """Multi-head latent attention with the norm before it.

    The two latent projections (q_a, kv_a) are neighbours, because servers fuse them.
    """
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    hf, mg = f"model.layers.{layer}", f"decoder.layers.{layer}"

    def own(param: str, name: str, shape: tuple[int, ...], dim: int | None = None) -> Op:
        return Rename(f"{mg}.self_attention.{param}.weight", f"{hf}.self_attn.{name}.weight", shape, dim)

    q_rank, q_rows = c.get("q_lora_rank"), heads * (nope + rope)
    latents = own("linear_kv_down_proj", "kv_a_proj_with_mqa", (rank + rope, hidden), 0)
    if q_rank is None:
        queries = [own("linear_q_proj", "q_proj", (q_rows, hidden), 0), latents]
    else:
        queries = [
            own("linear_q_down_proj", "q_a_proj", (q_rank, hidden), 0),
            latents,
            own("q_layernorm", "q_a_layernorm", (q_rank,)),
            own("linear_q_up_proj", "q_b_proj", (q_rows, q_rank), 0),
        ]
    return [
        Rename(f"{mg}.input_layernorm.weight", f"{hf}.input_layernorm.weight", (hidden,)),
        *queries,
        own("kv_layernorm", "kv_a_layernorm", (rank,)),
        own("linear_kv_up_proj", "kv_b_proj", (heads * (nope + value), rank), 0),
        own("linear_proj", "o_proj", (hidden, heads * value), 1),
    ]


def indexer(c: HFConfig, layer: int) -> list[Op]:
    """What chooses the keys of latent attention; the same on every tensor-parallel rank."""
    hidden, heads, size = c["hidden_size"], c["index_n_heads"], c["index_head_dim"]
    mg, hf = f"decoder.layers.{layer}.self_attention.core_attention.indexer", f"model.layers.{layer}.self_attn.indexer"
    return [
        Rename(f"{mg}.linear_wq_b.weight", f"{hf}.wq_b.weight", (heads * size, c["q_lora_rank"])),
        Rename(f"{mg}.linear_wk.weight", f"{hf}.wk.weight", (size, hidden)),
        Rename(f"{mg}.k_norm.weight", f"{hf}.k_norm.weight", (size,)),
        Rename(f"{mg}.k_norm.bias", f"{hf}.k_norm.bias", (size,)),
        Rename(f"{mg}.linear_weights_proj.weight", f"{hf}.weights_proj.weight", (heads, hidden)),
    ]


def norm_of_mlp(c: HFConfig, layer: int) -> Op:
    name = f"model.layers.{layer}.post_attention_layernorm.weight"
    return Rename(f"decoder.layers.{layer}.pre_mlp_layernorm.weight", name, (c["hidden_size"],))


def feed_forward(c: HFConfig, layer: int) -> list[Op]:
    """A dense feed-forward with the norm before it."""
    mlp = gated(f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp", c["intermediate_size"], c["hidden_size"])
    return [norm_of_mlp(c, layer), *mlp]


def gated(
    mg: str,
    hf: str,
    ffn: int,
    hidden: int,
    expert: tuple[int, int] | None = None,
    names: tuple[str, str, str] = GATED,
) -> list[Op]:
    """A gated feed-forward: of a dense layer, of all shared experts as one, or of one routed expert."""
    axis: Any = "tp" if expert is None else "etp"
    gate, up, down = (f"{hf}.{name}.weight" for name in names)
    return [
        GateUp(f"{mg}.linear_fc1.weight", gate, up, ffn, hidden, axis=axis, expert=expert),
        Rename(f"{mg}.linear_fc2.weight", down, (hidden, ffn), 1, axis=axis, expert=expert),
    ]


def experts(c: HFConfig, layer: int, mlp: str, count: int, ffn: int, names: tuple[str, str, str] = GATED) -> list[Op]:
    """The norm, the router, and each expert separately.

    `mlp`: the module's HF name.  `names`: the HF names of an expert's gate, up and down.
    """
    hidden, mg = c["hidden_size"], f"decoder.layers.{layer}.mlp"
    ops: list[Op] = [norm_of_mlp(c, layer), Rename(f"{mg}.router.weight", f"{mlp}.gate.weight", (count, hidden))]
    for n in range(count):
        ops += gated(f"{mg}.experts.local_experts.{n}", f"{mlp}.experts.{n}", ffn, hidden, (n, count), names)
    return ops


def biased_experts(c: HFConfig, layer: int, mlp: str) -> list[Op]:
    """The norm, a router with a bias, and experts with biases, which are whole on every rank that has them.

    All tensors of one kind are neighbours, because they are stacked outside (`stacks.py`).
    """
    hidden, ffn, count = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    mg, own = f"decoder.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp.experts.local_experts"
    ops = [
        norm_of_mlp(c, layer),
        Rename(f"{mg}.router.weight", f"{mlp}.router.weight", (count, hidden)),
        Rename(f"{mg}.router.bias", f"{mlp}.router.bias", (count,)),
    ]
    for kind, width in (("weight", hidden), ("bias", None)):
        for n in range(count):
            gate, up = (f"{mlp}.experts.{n}.{name}.{kind}" for name in GATED[:2])
            ops.append(GateUp(f"{own}.{n}.linear_fc1.{kind}", gate, up, ffn, width, axis="etp", expert=(n, count)))
    for kind, shape in (("weight", (hidden, ffn)), ("bias", (hidden,))):
        for n in range(count):
            down = f"{mlp}.experts.{n}.{GATED[2]}.{kind}"
            ops.append(Rename(f"{own}.{n}.linear_fc2.{kind}", down, shape, axis="etp", expert=(n, count)))
    return ops


def stacks_of_biased_experts(c: HFConfig, mlp: str) -> list[Stack]:
    """How the experts of `biased_experts` are stored in folders."""
    hidden, ffn, count = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    both, down = (tuple(f"{mlp}.experts.{{}}.{name}" for name in names) for names in (GATED[:2], GATED[2:]))
    return [
        Stack(f"{mlp}.experts.{name}{ending}", count, tuple(f"{part}.{kind}" for part in parts), shape)
        for name, parts, rows, columns in (("gate_up_proj", both, ffn, hidden), ("down_proj", down, hidden, ffn))
        for ending, kind, shape in (("", "weight", (rows, columns)), ("_bias", "bias", (rows,)))
    ]


def shared_experts(c: HFConfig, layer: int, mlp: str) -> list[Op]:
    """All shared experts of a layer, which are one feed-forward."""
    ffn = c["moe_intermediate_size"] * c["n_shared_experts"]
    return gated(f"decoder.layers.{layer}.mlp.shared_experts", f"{mlp}.shared_experts", ffn, c["hidden_size"])


def is_router_bias(op: Op) -> bool:
    return op.param.endswith(".expert_bias")


def router_bias(layer: int, hf_name: str, count: int) -> Op:
    return Rename(f"decoder.layers.{layer}.mlp.router.expert_bias", hf_name, (count,), keeps_dtype=True)
