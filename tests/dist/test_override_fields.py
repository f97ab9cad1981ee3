"""Each field of Megatron's that a run may set is run: the gradient and two clipped steps are those without it."""

import pytest
import torch
from parity_cases import Case, Found, Table
from parity_compare import assert_same_after, assert_same_gradient
from tiny_models import write_model

from megarl.arch.layout import Layout
from megarl.arch.megatron_fields import FUSIONS, MTP_LOSS_SCALE, OPTIMIZER, TRANSFORMER, TRIED, WRAPPER
from megarl.mcore.models.execution import ExecutionOptions

pytestmark = [pytest.mark.dist, pytest.mark.full]

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SP = Layout(tp=2, sequence_parallel=True)
# Field -> the values to run, the family, its ranks' layout and what else it needs.
CASES = {
    "batch_p2p_sync": ([False], "qwen3_moe", Layout(pp=2), {}),
    "recompute_modules": (
        [["core_attn", "moe"], ["mlp", "mla_up_proj", "shared_experts"]],
        "deepseek_v3",
        SP,
        {"recompute_granularity": "selective"},
    ),
    "align_param_gather": ([False, True], "qwen3_moe", Layout(pp=2, use_distributed_optimizer=True), OVERLAP),
    "bucket_size": ([1000], "qwen3_moe", Layout(), {"overlap_grad_reduce": True}),
    "pad_buckets_for_high_nccl_busbw": ([True], "qwen3_moe", Layout(use_distributed_optimizer=True), {}),
}


def cases(field: str) -> dict[str, Case]:
    values, _, layout, more = CASES[field]
    optim = "adamw" if layout.use_distributed_optimizer else "sgd"
    group = {TRANSFORMER: "override_transformer_config", WRAPPER: "override_ddp_config"}
    (of,) = (group[name] for name in group if field in TRIED[name])
    engines = [ExecutionOptions(**more), *(ExecutionOptions(**more, **{of: {field: value}}) for value in values)]
    return {f"{field} {at}": Case("actor", layout, one, optim=optim, num_steps=2) for at, one in enumerate(engines)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    root = tmp_path_factory.mktemp("models")
    folders = {
        family: str(write_model(root / family, family, tied=False)) for family in {case[1] for case in CASES.values()}
    }
    return Found(
        *(
            Table(2, folder, {k: v for field in CASES if CASES[field][1] == family for k, v in cases(field).items()})
            for family, folder in folders.items()
        )
    )


def test_every_field_is_run_but_those_of_an_optimizer_on_the_host() -> None:
    """Fused kernels are switched off in tests/te; here there is none.  The weight of a loss is no field of speed."""
    assert CASES.keys() == (TRIED[TRANSFORMER].keys() | TRIED[WRAPPER].keys()) - {*FUSIONS, MTP_LOSS_SCALE}
    assert all("optimizer" in field or "cpu" in field for field in TRIED[OPTIMIZER])


@pytest.mark.parametrize("field", CASES)
def test_override_fields_change_no_gradient_and_no_step(found: Found, field: str) -> None:
    without, *others = (found[name][0] for name in cases(field))
    for got in others:
        if without["gradient"]:
            assert_same_gradient(got["gradient"], without["gradient"])
        assert_same_after(got, without)
        assert all(torch.isfinite(weight).all() for weight in got["after"].values())
