"""What the ranks of test_bad_steps.py run: a good step, one with a bad number, and a good one again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from chunks import named_parameters
from engine_cases import Case, Trained
from parity_cases import make_step

from megarl.batch import Batch
from megarl.data.packing import plan
from megarl.mcore.models.model import unwrap
from megarl.mcore.setup import destroy_groups
from megarl.mcore.training.gradient_check import Limits, agreed, first_bad_gradient, first_bad_weight
from megarl.mcore.training.wrappers import FsdpOptimizer

SPLIT, COPIED = "module.decoder.layers.0.mlp.linear_fc1.weight", "module.decoder.final_layernorm.weight"
EXPERT = "module.decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
ADAPTER = "module.decoder.layers.0.mlp.linear_fc1.lora.up_proj.B"
LAST_RANK_ALONE = "the last rank's gradient of "


@dataclass(frozen=True)
class Bad:
    """`what`: "advantages" (of one sequence of the last replica), LAST_RANK_ALONE + a parameter, or "limits"."""

    what: str
    limits: Limits | None = None


def run(case: Case, bads: list[Bad]) -> dict[str, Any]:
    """The numbers of each bad step, whether it changed anything here, and the weights after two good steps."""
    trained = Trained(case, case.layout)
    try:
        batch = make_step(trained.hf["vocab_size"])
        assert trained.train(batch).made
        before, found = _state(trained), []
        for bad in bads:
            step, place = _bad_step(trained, batch, bad)
            same = all(torch.equal(a, b) for a, b in zip(before, _state(trained), strict=True))
            where = first_bad_gradient(trained.model)
            at = step.bad and (step.bad.column, step.bad.sequence)
            found.append({"step": step, "same": same, "at": at, "place": place, "where": where})
        assert trained.train(batch).made
        return {"bad": found, "weights": _weights(trained), "steps": trained.optimizer.step_index}
    finally:
        destroy_groups()


def _bad_step(trained: Trained, batch: Batch, bad: Bad) -> tuple[Any, int | None]:
    if bad.what == "limits":
        return trained.train(batch, bad.limits), None
    if bad.what == "advantages":
        part = plan(batch.lengths.tolist(), trained.where.num_replicas, max_tokens=40)[-1]
        mask, starts = batch.columns["response_mask"], batch.lengths.cumsum(0) - batch.lengths
        place = next(
            place
            for place, i in enumerate(part.indices)
            if mask[int(starts[i]) : int(starts[i] + batch.lengths[i])].any()
        )
        spoilt = batch.columns["advantages"].masked_fill(batch.segment_ids == part.indices[place], math.nan)
        return trained.train(batch.with_columns(advantages=spoilt), bad.limits), place
    if dist.get_rank() < dist.get_world_size() - 1:
        return trained.train(batch, bad.limits), None
    param = dict(named_parameters(trained.model))[bad.what.removeprefix(LAST_RANK_ALONE)]
    handle = param.register_hook(lambda gradient: gradient * math.inf)
    try:
        return trained.train(batch, bad.limits), None
    finally:
        handle.remove()


def _state(trained: Trained) -> list[torch.Tensor]:
    """Copies of everything that a step changes on this rank: weights, master weights and moments."""
    weights, optimizer = list(_weights(trained).values()), trained.optimizer
    if isinstance(optimizer.inner, FsdpOptimizer):
        moments = [tensor for _, tensor in optimizer.inner.own_parts()]
    else:
        moments = [tensor for *_, state in optimizer.runs() for tensor in state.values()]
    return [tensor.detach().clone() for tensor in (*weights, *moments)]


def _weights(trained: Trained) -> dict[str, torch.Tensor]:
    """By their hub names, and adapters by Megatron's."""
    adapters = {name: p.detach().clone() for name, p in named_parameters(trained.model) if ".lora." in name}
    return trained.weights() | adapters


def run_all(cases: dict[str, tuple[Case, list[Bad]]]) -> dict[str, dict[str, Any]]:
    return {name: run(*case) for name, case in cases.items()}


def agreements(case: Case) -> tuple[float, float]:
    """Of norms and losses that differ from rank to rank."""
    trained = Trained(case, case.layout)
    rank = dist.get_rank()
    loss = torch.tensor(0.25 + rank, dtype=torch.float64) if trained.where.is_reporter else None
    found = agreed(1.5 + rank, loss)
    destroy_groups()
    return found


def bad_weights(case: Case) -> list[str | None]:
    """What each rank finds in weights that are finite, and with an infinite one on the last rank."""
    trained = Trained(case, case.layout)
    found = [first_bad_weight(trained.model)]
    if dist.get_rank() == dist.get_world_size() - 1:
        dict(unwrap(trained.model[0]).named_parameters())[COPIED.removeprefix("module.")].data[3] = -math.inf
    found.append(first_bad_weight(trained.model))
    destroy_groups()
    return found
