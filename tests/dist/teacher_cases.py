"""What the ranks of test_teachers_dist.py run: a teacher's hidden states, and a student's gradient, under a layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from chunks import gradients
from torch import Tensor

from megarl.algo import ActorLoss
from megarl.algo.distillation import Distillation
from megarl.data.packing import plan
from megarl.layout import Layout
from megarl.mcore.models.model import build_model, read_hf_config
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.mcore.training.optimizer import wrap_for_training
from megarl.mcore.training.packed_rows import micro_batches
from megarl.mcore.training.step import HIDDEN, Outputs, backward, forward_only
from megarl.sample import Batch
from megarl.weights.hf.head import read_heads
from megarl.weights.hf.load import load_hf

CPU = torch.device("cpu")
TEMPERATURE, BETA = 0.8, 0.3


def hidden_states(folder: str, batch: Batch, layouts: dict[str, Layout]) -> dict[str, list[tuple[list[int], Tensor]]]:
    """Of each layout, on reporters: the samples of this replica, and their hidden states [N, H]."""
    found = {}
    for name, layout in layouts.items():
        where = make_groups(layout)
        try:
            hf = read_hf_config(folder)
            model = build_model(hf, layout)
            load_hf(model, folder, hf)
            part = plan(batch.lengths.tolist(), where.num_replicas, max_tokens=24)[where.replica]
            micros = micro_batches(batch.select(part.indices).keep_columns(), part.micro_sizes)
            columns = forward_only(model, micros, Outputs(layout, hf["vocab_size"], names=(HIDDEN,)), CPU)
            mine = (part.indices, torch.cat([c[HIDDEN] for c in columns])) if where.is_reporter else None
            found[name] = [mine] if mine else []
        finally:
            destroy_groups()
    return found


def student_gradients(
    student: str, teachers: list[str], batch: Batch, cases: dict[str, tuple[Layout, str]]
) -> dict[str, Any]:
    """Of each case, a layout and a divergence: the statistics on reporters, and on rank 0 the whole gradient."""
    found = {}
    for case, (layout, name) in cases.items():
        where = make_groups(layout)
        try:
            hf = read_hf_config(student)
            model = build_model(hf, layout)
            load_hf(model, student, hf)
            model = wrap_for_training(model, layout)
            heads = read_heads(teachers, model, hf["vocab_size"])
            loss = ActorLoss("reinforce", distillation=Distillation(name, BETA, teachers=("first", "second")))
            part = plan(batch.lengths.tolist(), where.num_replicas, max_tokens=24)[where.replica]
            micros = micro_batches(batch.select(part.indices).keep_columns(*loss.columns), part.micro_sizes)
            assert loss.distillation is not None
            outputs = Outputs(
                layout, hf["vocab_size"], TEMPERATURE, tuple(loss.outputs), loss.distillation.function, heads
            )
            stats = backward(model, micros, outputs, loss, num_tokens=batch.num_tokens, device=CPU)
            gradient = gradients(model, hf, "actor")
            found[case] = {
                "stats": stats if where.is_reporter else {},
                "gradient": gradient if dist.get_rank() == 0 else {},
                "num_micros": len(micros),
            }
        finally:
            destroy_groups()
    return found
