"""What ranks of test_distill_teachers_dist.py run: a teacher's columns, and a student's gradient, under a layout."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from chunks import gradients, parameters
from torch import Tensor

from megarl.algo import ActorLoss
from megarl.algo.distillation import Distillation
from megarl.arch.hf_config import read_hf_config
from megarl.arch.layout import Layout
from megarl.data.packing import RankPlan, plan
from megarl.data.prefix_tree import prefix_groups
from megarl.mcore.models.lora import LoraSettings, apply_lora
from megarl.mcore.models.model import build_model
from megarl.mcore.setup import RankInfo, destroy_groups, make_groups
from megarl.mcore.training.optimizer import wrap_for_training
from megarl.mcore.training.packed_rows import make_row, micro_batches
from megarl.mcore.training.step import HIDDEN, TOP_K, Outputs, backward, forward_only
from megarl.samples.batch import Batch, MicroBatch
from megarl.weights.hf.adapter import adapter_tensors
from megarl.weights.hf.load import load_hf, read_heads

CPU = torch.device("cpu")
TEMPERATURE, BETA = 0.8, 0.3


def packed(
    batch: Batch, where: RankInfo, columns: Sequence[str], shares_prefixes: bool
) -> tuple[RankPlan, list[MicroBatch]]:
    """This replica's sequences, with these columns."""
    how: dict[str, Any] = {"max_tokens": 24}
    if shares_prefixes:
        how["groups"] = prefix_groups(batch, where.num_replicas, max_sequences=None, hidden_size=32, **how)
    part = plan(batch.lengths.tolist(), where.num_replicas, **how)[where.replica]
    own = batch.select(part.indices).keep_columns(*columns)
    return part, micro_batches(own, part.micro_sizes, shares_prefixes=shares_prefixes)


def teacher_columns(
    folder: str, batch: Batch, layouts: dict[str, Layout], top_k: int, shares_prefixes: bool = False
) -> dict[str, list[tuple[list[int], dict[str, Tensor]]]]:
    """Of each layout, on reporters: the samples of this replica, and their hidden states and most likely tokens.

    The latter of the first 45 tokens.
    """
    found = {}
    for name, layout in layouts.items():
        where = make_groups(layout)
        try:
            hf = read_hf_config(folder)
            model = build_model(hf, layout)
            load_hf(model, folder, hf)
            part, micros = packed(batch, where, (), shares_prefixes)
            said: dict[str, Tensor] = {}
            for names in ((HIDDEN,), TOP_K):
                outputs = Outputs(layout, 45, TEMPERATURE, names, top_k=top_k)
                columns = forward_only(model, micros, outputs, CPU)
                said |= {n: torch.cat([c[n] for c in columns]) for n in names} if where.is_reporter else {}
            found[name] = [(part.indices, said)] if said else []
        finally:
            destroy_groups()
    return found


def student_gradients(
    student: str,
    teachers: list[str],
    batch: Batch,
    cases: dict[str, tuple[Layout, str]],
    top_k: bool,
    lora: LoraSettings | None = None,
    shares_prefixes: bool = False,
) -> dict[str, Any]:
    """Of each case, a layout and a divergence: the statistics on reporters, and on rank 0 the whole gradient.

    `top_k`: over the teachers' most likely tokens and their tail.  `lora`: the gradient and the weights of adapters.
    """
    found = {}
    for case, (layout, name) in cases.items():
        where = make_groups(layout)
        try:
            hf = read_hf_config(student)
            model = build_model(hf, layout)
            load_hf(model, student, hf)
            if lora is not None:
                apply_lora(model, lora)
            chunks, model = model, wrap_for_training(model, layout)
            heads = read_heads(teachers, model, hf["vocab_size"])
            loss = ActorLoss("reinforce", distillation=Distillation(name, BETA, top_k, ("first", "second")))
            _, micros = packed(batch, where, loss.columns, shares_prefixes)
            assert loss.distillation is not None
            outputs = Outputs(
                layout, hf["vocab_size"], TEMPERATURE, tuple(loss.outputs), loss.distillation.function, heads
            )
            stats = backward(model, micros, outputs, loss, num_tokens=batch.num_tokens, device=CPU).stats
            adapters = {} if lora is None else {n: t.clone() for n, t in adapter_tensors(chunks, hf)}
            if lora is None:
                gradient = gradients(model, hf, "actor")
            else:
                for param in (param for param in parameters(model) if param.requires_grad):
                    param.data = param.main_grad
                gradient = {n: t.clone() for n, t in adapter_tensors(chunks, hf)}
            found[case] = {
                "stats": stats if where.is_reporter else {},
                "gradient": gradient if dist.get_rank() == 0 else {},
                "adapters": adapters if dist.get_rank() == 0 else {},
                "num_micros": len(micros),
                "num_places": sum(make_row(micro, layout, CPU).tokens.numel() for micro in micros),
            }
        finally:
            destroy_groups()
    return found
