"""What is trained of a role: all parameters, or those of LoRA adapters, by the shapes of the projections.

An adapter of a matrix [out, in] has rank * (in + out) parameters.  Ranks cut one of its factors as they cut the matrix,
and each has the whole other one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from megarl.arch.layers import HFConfig
from megarl.arch.layout import Layout
from megarl.arch.projections import LINEARS, chosen, projections_of
from megarl.plan.job import Job, Role
from megarl.weights.count import Kind, Parameters, kinds_of_stage, of_stage
from megarl.weights.mapping.names import Rename

LATENTS = {"q_a_proj", "kv_a_proj_with_mqa"}
STACKED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}, LATENTS)  # each one matrix of SGLang


class Matrix(NamedTuple):
    """The weight of a projection, and whether its columns are cut over ranks, else its rows."""

    rows: int
    columns: int
    by_columns: bool = False


def trained(role: Role, stage: int) -> Parameters:
    """Parameters that the optimizer changes, on each rank of a pipeline stage: indexers are frozen."""
    if role.lora_rank:
        return of_adapters(role.hf, role.layout, stage, role.lora_rank, role.lora_targets)
    here = role.hf, role.layout, stage
    parameters, kinds = of_stage(*here, role.name, role.mtp), kinds_of_stage(*here, role.mtp)
    frozen = sum(count * kind.of("indexer") for kind, count in kinds.items())
    return parameters._replace(dense=parameters.dense - frozen)


def of_adapters(hf: HFConfig, layout: Layout, stage: int, rank: int, targets: tuple[str, ...]) -> Parameters:
    """Parameters of the adapters on each rank of a pipeline stage."""
    wanted = chosen(targets, projections_of(hf))
    dense = experts = 0
    for kind, count in kinds_of_stage(hf, layout, stage).items():
        dense += count * rank * _numbers(_matrices(kind, ".self_attention.") | _shared(kind), wanted, layout.tp)
        local = kind.layer.experts.count // layout.ep if kind.layer.experts else 0
        experts += count * local * rank * _numbers(_of_expert(kind), wanted, layout.expert_tp)
    return Parameters(dense, experts)


def of_server(job: Job) -> int:
    """Numbers on each GPU of a server that its memory for one adapter has, in SGLang (srt/lora/mem_pool.py).

    It has all parts of a stacked matrix if one is adapted, the latents whole on each GPU, and experts in each layer.
    """
    hf, wanted = job.actor.hf, set(chosen(job.actor.lora_targets, projections_of(job.actor.hf)))
    wanted |= {part for parts in STACKED if wanted & parts for part in parts}
    total = most = 0
    for kind, count in kinds_of_stage(hf, Layout(), 0).items():
        attention = _matrices(kind, ".self_attention.")
        total += count * _numbers(attention, wanted - LATENTS, job.server_gpus // job.attention_dp)
        total += count * _numbers(attention, wanted & LATENTS, 1)
        total += count * _numbers(_shared(kind), wanted, job.server_gpus)
        local = kind.layer.experts.count // job.server_ep if kind.layer.experts else 0
        most = max(most, local * _numbers(_of_expert(kind), wanted, job.server_gpus // job.server_ep))
    return job.actor.lora_rank * (total + hf["num_hidden_layers"] * most)


def _numbers(matrices: Mapping[str, Matrix], wanted: Collection[str], ranks: int) -> int:
    """The sum of rows and columns that a rank has of A and B, for rank 1."""
    total = 0
    for name in wanted:
        if name in matrices:
            rows, columns, by_columns = matrices[name]
            total += rows + columns // ranks if by_columns else rows // ranks + columns
    return total


def _matrices(kind: Kind, module: str, *, of_expert: bool = False) -> dict[str, Matrix]:
    """The projections under a module of a layer."""
    found = {}
    for op in kind.ops:
        if module in op.param and op.param.endswith(".weight") and (op.expert is not None) is of_expert:
            names = LINEARS.get(op.param.split(".")[-2], ())
            for name, (rows, columns) in zip(names, op.hf_shapes.values(), strict=False):
                found[name] = Matrix(rows, columns, isinstance(op, Rename) and op.dim == 1)
    return found


def _shared(kind: Kind) -> dict[str, Matrix]:
    """Those of the feed-forward that is no routed expert: a dense layer's, or that of the shared experts."""
    return _matrices(kind, ".mlp.")


def _of_expert(kind: Kind) -> dict[str, Matrix]:
    return _matrices(kind, ".mlp.", of_expert=True)
