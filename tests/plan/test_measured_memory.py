"""Memory that the planner predicts against what tensors take on CPUs: our own engine, a tiny model, float32."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from preset_files import hf_of
from spawn import Ranks, run_ranks

from benchmarks.common.tensor_memory import TensorMemory
from benchmarks.plan import bench_plan_memory
from benchmarks.plan.memory_ranks import PARTS, Case, measure, predicted
from megarl.arch.layout import Layout
from megarl.plan.job import Role
from megarl.plan.memory import of_stage_bytes
from megarl.weights.count import whole

pytestmark = pytest.mark.dist

STATIC = PARTS[:3]
QWEN, SPARSE = hf_of("qwen3_mini"), hf_of("qwen3_moe_mini")
# predicted / measured of the peak of all tensors: the rule errs upwards where a layer is recomputed
TOTAL = (1.0, 1.6)
EXACT = 0.005  # of weights, gradients and optimizer, which also count their steps


def check(found: dict[str, dict[str, int]]) -> None:
    predicted, measured = found["predicted"], found["measured"]
    for part in STATIC:
        assert predicted[part] == pytest.approx(measured[part], rel=EXACT), part
    assert TOTAL[0] < predicted["total"] / measured["total"] < TOTAL[1]


@pytest.fixture(scope="module")
def one_rank() -> Any:
    with Ranks(1) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("hf", "fields"),
    [
        pytest.param(QWEN, {"recompute": True, "sequences": 16}, id="dense recomputed, many sequences"),
        pytest.param(SPARSE, {"recompute": True}, id="experts recomputed"),
        pytest.param(QWEN, {}, id="dense", marks=pytest.mark.full),
        pytest.param(SPARSE, {}, id="experts", marks=pytest.mark.full),
    ],
)
def test_of_one_process(one_rank: Ranks, hf: dict[str, Any], fields: dict[str, Any]) -> None:
    (found,) = one_rank.run(measure, Case("one", hf, **fields))
    check(found)


@pytest.mark.full
@pytest.mark.megatron_0_19
@pytest.mark.parametrize(("preset", "recompute"), [("nemotron_h_mini", True), ("deepseek_v3_2_mini", False)])
def test_of_one_process_of_states_and_of_indexers(one_rank: Ranks, preset: str, recompute: bool) -> None:
    (found,) = one_rank.run(measure, Case("one", hf_of(preset), recompute=recompute))
    check(found)


def test_of_one_process_in_bfloat16_with_float32_copies(one_rank: Ranks) -> None:
    (found,) = one_rank.run(measure, Case("one", QWEN, recompute=True, dtype="bfloat16"))
    for part, width in (("weights", 2), ("gradients", 4), ("optimizer", 12)):
        assert found["predicted"][part] == width * whole(QWEN)
        assert found["predicted"][part] == pytest.approx(found["measured"][part], rel=EXACT), part
    assert TOTAL[0] < found["predicted"]["total"] / found["measured"]["total"] < TOTAL[1]


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        ({"tp": 2, "sequence_parallel": True}, {}),
        ({"pp": 2}, {"recompute": True, "micro_batches": 4}),
        ({"use_distributed_optimizer": True}, {"recompute": True}),
        ({"use_distributed_optimizer": True}, {"fsdp": True}),
    ],
    ids=["tensor", "pipeline", "sharded optimizer", "fsdp"],
)
def test_of_two_ranks(layout: dict[str, Any], fields: dict[str, Any]) -> None:
    for found in run_ranks(2, measure, Case("two", QWEN, layout, 2, **fields)):
        check(found)


def test_a_line_of_the_table():
    parts = {"weights": 100, "gradients": 100, "optimizer": 200, "activations": 50, "total": 450}
    said = bench_plan_memory.line(Case("x", QWEN), 0, {"predicted": parts, "measured": parts | {"activations": 100}})
    assert said["static predicted / measured"] == 1.0 and said["activations predicted / measured"] == 0.5
    assert said["weights"] == "0 / 0" and said["tokens"] == 4 * 128


def test_the_cases_are_ranks_that_can_be():
    for case in bench_plan_memory.cases():
        layout = Layout(**case.layout)
        assert layout.data_parallel_size(case.num_ranks) >= 1
        role = Role("actor", case.hf, layout, case.num_ranks, max_tokens=case.tokens, dtype="float32", local=True)
        memory = of_stage_bytes(role, 0)
        assert all(getattr(memory, part) > 0 for part in PARTS)
    assert [case.name for case in bench_plan_memory.cases(quick=True)] == ["qwen3", "qwen3 recomputed"]


@pytest.mark.parametrize(("free_gb", "layers"), [(167, [24, 28, 28]), (89, [24, 28, 11]), (24, [24, 9])])
def test_on_a_gpu_models_have_as_many_layers_as_fit(free_gb: int, layers: list[int]) -> None:
    found = bench_plan_memory.gpu_cases(free_gb * 10**9)
    assert [case.hf["num_hidden_layers"] for case in found] == layers
    room = 0.9 * free_gb * 10**9
    assert all(predicted(case, Layout(), 0).total <= room for case in found)
    if free_gb == 89:
        assert found[2].name == "qwen2_5_7b, local layers, 11 of 28 layers"
        more = replace(found[2], hf=found[2].hf | {"num_hidden_layers": 12})
        assert predicted(more, Layout(), 0).total > room


def test_on_a_gpu_without_room_there_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="4 GB of the GPU are free; expected room for qwen2_5_0_5b"):
        bench_plan_memory.gpu_cases(4 * 10**9)


def test_a_case_that_fails_is_a_note_and_the_others_have_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    options, parts = bench_plan_memory.parser().parse_args(["--device", "cpu", "--quick"]), dict.fromkeys(PARTS, 100)
    refused = {"qwen3 recomputed"}

    def rows(case: Case) -> list[dict[str, Any]]:
        if case.name in refused:
            raise ValueError(f"case {case.name}: out of memory")
        return [bench_plan_memory.line(case, 0, dict.fromkeys(("predicted", "measured"), parts | {"total": 400}))]

    monkeypatch.setattr(bench_plan_memory, "_rows", rows)
    result = bench_plan_memory.work(options)
    assert [row["case"] for row in result.rows] == ["qwen3"]
    assert result.notes[1:] == ["case qwen3 recomputed: out of memory"]
    refused.add("qwen3")
    with pytest.raises(ValueError, match="case qwen3: out of memory; case qwen3 recomputed: out of memory"):
        bench_plan_memory.work(options)


def test_what_is_counted_is_storages():
    with TensorMemory() as memory:
        kept = torch.zeros(1000)
        view = kept.view(10, 100)
        assert view.shape == (10, 100)
    assert memory.peak_bytes == 4000


def test_the_ratios_are_the_ends_and_the_median_error() -> None:
    rows = [{"static predicted / measured": ratio, "total predicted / measured": 1.0} for ratio in (0.5, 0.8, 1.5)]
    found = bench_plan_memory.ratios(rows)
    assert (found["least_static"], found["most_static"], found["total_median_log_error"]) == (0.5, 1.5, 0.0)
    assert found["static_median_log_error"] == pytest.approx(math.log(1.5))
    assert list(found)[-2:] == ["static_median_log_error", "total_median_log_error"]
