"""What is trained of a role: all parameters, or those of LoRA adapters, by the shapes of the projections.

An adapter of a matrix [out, in] has rank * (in + out) parameters.  Ranks cut one of its factors as they cut the matrix,
and each has the whole other one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from megarl.arch.count import (
    HFConfig,
    Parameters,
    attention_size,
    expert_size,
    kinds_of_stage,
    num_experts,
    of_stage,
)
from megarl.arch.layout import Layout
from megarl.arch.projections import chosen, projections_of
from megarl.plan.job import Job, Role

LATENTS = {"q_a_proj", "kv_a_proj_with_mqa"}
STACKED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}, LATENTS)  # each one matrix of SGLang


class Matrix(NamedTuple):
    """The weight of a projection, and whether its columns are cut over ranks, else its rows."""

    rows: int
    columns: int
    by_columns: bool = False


def trained(role: Role, stage: int) -> Parameters:
    """Parameters that the optimizer changes, on each rank of a pipeline stage."""
    if role.lora_rank:
        return of_adapters(role.hf, role.layout, stage, role.lora_rank, role.lora_targets)
    return of_stage(role.hf, role.layout, stage, role.name)


def of_adapters(hf: HFConfig, layout: Layout, stage: int, rank: int, targets: tuple[str, ...]) -> Parameters:
    """Parameters of the adapters on each rank of a pipeline stage."""
    wanted = chosen(targets, projections_of(hf))
    dense = experts = 0
    for sparse, count in kinds_of_stage(hf, layout, stage).items():
        parts = _attention(hf) | _feed_forward(hf, _dense_width(hf, sparse))
        dense += count * rank * _numbers(parts, wanted, layout.tp)
        if sparse:
            local = (num_experts(hf) or 0) // layout.ep
            experts += count * local * rank * _numbers(_feed_forward(hf, expert_size(hf)), wanted, layout.expert_tp)
    return Parameters(dense, experts)


def of_server(job: Job) -> int:
    """Numbers on each GPU of a server that its memory for one adapter has, in SGLang (srt/lora/mem_pool.py).

    It has all parts of a stacked matrix if one is adapted, the latents whole on each GPU, and experts in each layer.
    """
    hf, wanted = job.actor.hf, set(chosen(job.actor.lora_targets, projections_of(job.actor.hf)))
    wanted |= {part for parts in STACKED if wanted & parts for part in parts}
    attention, layers = _attention(hf), hf["num_hidden_layers"]
    total = layers * _numbers(attention, wanted - LATENTS, job.server_gpus // job.attention_dp)
    total += layers * _numbers(attention, wanted & LATENTS, 1)
    for sparse, count in kinds_of_stage(hf, Layout(), 0).items():
        total += count * _numbers(_feed_forward(hf, _dense_width(hf, sparse)), wanted, job.server_gpus)
    local, cut = (num_experts(hf) or 0) // job.server_ep, job.server_gpus // job.server_ep
    if local:
        total += layers * local * _numbers(_feed_forward(hf, expert_size(hf)), wanted, cut)
    return job.actor.lora_rank * total


def _numbers(matrices: Mapping[str, Matrix], wanted: Collection[str], ranks: int) -> int:
    """The sum of rows and columns that a rank has of A and B, for rank 1."""
    total = 0
    for name in wanted:
        if name in matrices:
            rows, columns, by_columns = matrices[name]
            total += rows + columns // ranks if by_columns else rows // ranks + columns
    return total


def _dense_width(hf: HFConfig, sparse: bool) -> int:
    """Of the feed-forward that is no routed expert: a dense layer's, or that of the shared experts (0: none)."""
    return expert_size(hf) * (hf.get("n_shared_experts") or 0) if sparse else hf["intermediate_size"]


def _feed_forward(hf: HFConfig, width: int) -> dict[str, Matrix]:
    hidden = hf["hidden_size"]
    if not width:
        return {}
    up = Matrix(width, hidden)
    return {"gate_proj": up, "up_proj": up, "down_proj": Matrix(hidden, width, by_columns=True)}


def _attention(hf: HFConfig) -> dict[str, Matrix]:
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
    if "kv_lora_rank" not in hf:
        size = attention_size(hf)
        key = Matrix((hf.get("num_key_value_heads") or heads) * size, hidden)
        return {
            "q_proj": Matrix(heads * size, hidden),
            "k_proj": key,
            "v_proj": key,
            "o_proj": Matrix(hidden, heads * size, by_columns=True),
        }
    plain, rope, value = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
    latent, q_latent = hf["kv_lora_rank"], hf.get("q_lora_rank") or hidden
    queries = heads * (plain + rope)
    return {
        "q_proj": Matrix(queries, hidden),
        "q_a_proj": Matrix(q_latent, hidden),
        "q_b_proj": Matrix(queries, q_latent),
        "kv_a_proj_with_mqa": Matrix(latent + rope, hidden),
        "kv_b_proj": Matrix(heads * (plain + value), latent),
        "o_proj": Matrix(hidden, heads * value, by_columns=True),
    }
