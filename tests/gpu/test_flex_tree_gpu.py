"""On a real GPU: rows that share prefixes, by FlexAttention's kernels: attention by its definition, and whole steps."""

from typing import Any

import pytest
import torch
from flex_cases import KINDS, answers, errors, inputs_of
from parity_cases import Case, make_alike_step, run_case
from step_cases import FAMILIES, gradient_error, log_prob_error

from megarl.mcore.models.prefix_trees.flex_tree import FlexPlan

pytestmark = pytest.mark.gpu
ROWS = {"one block": (20, [30, 8]), "several blocks": (700, [300, 41, 500]), "long": (2500, [600, 700, 1, 90])}
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # a gradient goes through several roundings


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", CLOSE)
def test_outputs_and_gradients_are_those_of_the_definition(dtype: torch.dtype, kind: str, row: str) -> None:
    found = errors(KINDS[kind], answers(*ROWS[row]), dtype, torch.device("cuda"))
    assert max(found.values()) < CLOSE[dtype], found


def test_rows_of_other_lengths_need_no_other_kernel() -> None:
    device, kind = torch.device("cuda"), KINDS["windows and sinks"]
    errors(kind, answers(300, [90, 8]), torch.bfloat16, device)
    with torch.compiler.set_stance("fail_on_recompile"):
        for row in ((200, [30] * 9), (900, [300]), (130, [2, 90, 90])):
            assert max(errors(kind, answers(*row), torch.bfloat16, device).values()) < CLOSE[torch.bfloat16]


def test_scores_are_never_in_memory() -> None:
    device, tree = torch.device("cuda"), answers(20_000, [1000] * 12)
    inputs, sinks = inputs_of(KINDS["grouped queries"], tree, torch.bfloat16, device)
    FlexPlan.of(tree, device).attend(*inputs, sinks, None, 0.1).sum().backward()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    FlexPlan.of(tree, device).attend(*inputs, sinks, None, 0.1).sum().backward()
    of_one_head = tree.num_places**2  # bytes of a mask; scores are more
    assert torch.cuda.max_memory_allocated() - before < of_one_head


def step(folder: str, *, shares: bool) -> dict[str, Any]:
    """Of `run_case`, with log-probs in the order of the batch."""
    found = run_case(folder, Case("actor", max_tokens=200, alike=True, shares_prefixes=shares))
    lengths = make_alike_step(4).lengths[found["indices"]].tolist()
    rows = dict(zip(found["indices"], found["columns"]["log_probs"].double().cpu().split(lengths), strict=True))
    return found | {"log_probs": torch.cat([rows[index] for index in sorted(rows)])}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_that_of_rows_apart(world: None, folders: dict[str, str], family: str) -> None:  # noqa: ARG001
    """Float32 and local layers."""
    apart, shared = (step(folders[family], shares=x) for x in (False, True))
    assert shared["num_places"] % FlexPlan.UNIT == 0
    assert gradient_error(shared, apart) < 1e-4
    assert log_prob_error(shared, apart) < 1e-5
