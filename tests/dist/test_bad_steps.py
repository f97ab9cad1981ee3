"""An optimizer step with a bad number is not made: on every rank nothing changes, whichever rank has the number.

Each case takes a good step, the bad ones, and a good one; the weights are then those of two good steps alone, bit for
bit, which are taken in a case without a bad step.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chunks import named_parameters
from engine_cases import Case, Trained
from parity_cases import make_step
from rank_answers import Answers
from spawn import Ranks

from megarl.algo.spikes import Limits
from megarl.arch.layout import Layout
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.data.packing import plan
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.model import unwrap
from megarl.mcore.setup import destroy_groups
from megarl.mcore.training.gradient_check import agreed, first_bad_gradient, first_bad_weight
from megarl.mcore.training.wrappers import FsdpOptimizer
from megarl.samples.batch import Batch

pytestmark = pytest.mark.dist

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


def step_of_nothing_known(case: Case) -> tuple[bool, str, bool]:
    """No old log-prob is finite: clips and maxima let no gradient through, and none is NaN of itself."""
    trained = Trained(case, case.layout)
    batch = make_step(trained.hf["vocab_size"])
    unknown = torch.full_like(batch.columns["old_log_probs"], math.nan)
    step = trained.train(batch.with_columns(old_log_probs=unknown))
    destroy_groups()
    return step.made, step.bad.column if step.bad else "", math.isnan(step.grad_norm)


def bad_weights(case: Case) -> list[str | None]:
    """What each rank finds in weights that are finite, and with an infinite one on the last rank."""
    trained = Trained(case, case.layout)
    found = [first_bad_weight(trained.model)]
    if dist.get_rank() == dist.get_world_size() - 1:
        dict(unwrap(trained.model[0]).named_parameters())[COPIED.removeprefix("module.")].data[3] = -math.inf
    found.append(first_bad_weight(trained.model))
    destroy_groups()
    return found


SHARDED = Layout(use_distributed_optimizer=True)
SAMPLE, NO_LIMIT = Bad("advantages"), Limits()
NORM = Bad("limits", Limits(grad_norm=1e-9))
OVERLAP = ExecutionOptions(overlap_grad_reduce=True, overlap_param_gather=True)


def of_last(name: str) -> Bad:
    return Bad(LAST_RANK_ALONE + name)


@dataclass(frozen=True)
class Cut:
    """How the steps are made, and the bad ones, a sample's first.

    `placed`: the ranks that name the sample's place.  `known`: the number of a bad step -> the parameter with the bad
    gradient, which the last rank names; the others name none.
    """

    bads: list[Bad]
    layout: Layout = Layout()
    engine: ExecutionOptions = ExecutionOptions()
    placed: tuple[int, ...] | None = None
    known: dict[int, str] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


# Of a parameter that both ranks hold alike Megatron counts rank 0's gradient only; rank 1 has the NaN.  Replicas have
# summed their gradients, so both have it; experts are rank 1's own.
ALONE = Cut([SAMPLE, of_last(SPLIT), NORM, Bad("limits", Limits(loss=-1e9))], placed=(0,))
NONE = replace(ALONE, engine=ExecutionOptions("none"))
SIZES = TinySizes(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48)
CUTS: dict[str, Cut] = {
    "dp2": replace(ALONE, placed=(1,)),
    "pp2": Cut(
        [SAMPLE, replace(SAMPLE, limits=NO_LIMIT), of_last(COPIED)], Layout(pp=2), placed=(1,), known={2: COPIED}
    ),
    "dp2, sharded, overlapped": Cut([SAMPLE, of_last(SPLIT)], SHARDED, OVERLAP),
    "tp2": Cut([SAMPLE, of_last(SPLIT), of_last(COPIED)], Layout(tp=2), placed=(0, 1), known={1: SPLIT, 2: COPIED}),
    "fsdp": Cut([SAMPLE, NORM], SHARDED, ExecutionOptions("fsdp"), placed=(1,)),
    "cp2": Cut([SAMPLE, of_last(SPLIT)], Layout(cp=2)),
    "ep2": Cut([SAMPLE, of_last(EXPERT), of_last(COPIED)], Layout(ep=2), known={1: EXPERT}),
    "muon": Cut([SAMPLE, of_last(SPLIT)], more={"optim": "muon"}),
    "adapters": Cut([SAMPLE, of_last(ADAPTER)], Layout(tp=2), known={1: ADAPTER}, more={"with_adapters": True}),
}
FAST = ("none", "dp2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    where: Path = tmp_path_factory.mktemp("model")
    write_tiny_model(where, SIZES, seed=1)
    return str(where)


@pytest.fixture(scope="module")
def found(one_rank: Ranks, two_ranks: Ranks, folder: str) -> Answers:
    """Each case, and by the name of it and " without" the one without a bad step."""
    moe = f"{folder}_moe"
    write_tiny_model(moe, SIZES, seed=1, family="qwen3_moe")
    groups = []
    slow = [name for name in CUTS if name not in FAST]
    for ranks, names in ((one_rank, ["none"]), (two_ranks, FAST[1:]), (two_ranks, slow)):
        cases: dict[str, tuple[Case, list[Bad]]] = {}
        for name in names:
            cut = NONE if name == "none" else CUTS[name]
            case = Case(moe if name == "ep2" else folder, cut.layout, cut.engine, **cut.more)
            cases |= {name: (case, cut.bads), f"{name} without": (case, [])}
        groups.append((cases, partial(ranks.run, run_all, cases, timeout_s=400)))
    return Answers(*groups)


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.full) for name in CUTS if name not in FAST)]
)
def test_nothing_changes_on_any_rank_and_all_see_the_same_numbers(found: Answers, name: str) -> None:
    ranks, cut = found[name], NONE if name == "none" else CUTS[name]
    for rank, plain in zip(ranks, found[f"{name} without"], strict=True):
        assert [one["step"].made for one in rank["bad"]] == [False] * len(cut.bads)
        assert all(one["same"] for one in rank["bad"]), "weights, master weights and moments"
        assert rank["steps"] == plain["steps"] == 2, "the schedule counts the steps that were made"
        assert rank["weights"].keys() == plain["weights"].keys()
        assert all(torch.equal(rank["weights"][n], plain["weights"][n]) for n in plain["weights"])
    first, *others = ([(one["step"].grad_norm, one["step"].loss) for one in rank["bad"]] for rank in ranks)
    assert all(repr(other) == repr(first) for other in others), "NaN is not equal to itself"
    for bad, (norm, loss) in zip(cut.bads, first, strict=True):
        assert math.isfinite(norm) == (bad.what == "limits")
        assert math.isnan(loss) == (bad.limits is NO_LIMIT), "only a loss that is to be compared is summed"
    for rank, bads in enumerate(one["bad"] for one in ranks):
        if cut.placed is not None:
            assert bads[0]["at"] == (("advantages", bads[0]["place"]) if rank in cut.placed else None)
            assert not any(one["at"] for one, bad in zip(bads, cut.bads, strict=True) if bad.what != "advantages")
        for number, parameter in cut.known.items():
            is_last = rank == len(ranks) - 1
            assert bads[number]["where"] == (parameter.removeprefix("module.") if is_last else None)


def test_a_step_is_not_made_where_no_gradient_comes_from_a_bad_number(one_rank: Ranks, folder: str) -> None:
    assert one_rank.run(step_of_nothing_known, Case(folder)) == [(False, "old_log_probs", True)]


def test_a_norm_is_rank_0s_and_each_replicas_loss_counts_once(two_ranks: Ranks, folder: str) -> None:
    """Losses of 0.25 on rank 0 and of 1.25 on rank 1."""
    for layout, loss in ((Layout(), 1.5), (Layout(tp=2), 0.25), (Layout(pp=2), 1.25)):
        assert two_ranks.run(agreements, Case(folder, layout)) == [(1.5, loss)] * 2


def test_a_weight_that_is_not_finite_is_found_on_its_rank(two_ranks: Ranks, folder: str) -> None:
    case = Case(folder, Layout(tp=2), dtype="bfloat16")
    assert two_ranks.run(bad_weights, case) == [[None, None], [None, "decoder.final_layernorm.weight"]]
