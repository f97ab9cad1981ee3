"""The benchmark of the training step: both loops do the same, and its arithmetic."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.common import machine
from benchmarks.step import bench_step
from benchmarks.step.bench_step import SIZES, WIDE, check_alike, head_share, lengths_of, model_config, step_flops
from benchmarks.step.loops import make_work


def options(**given: Any) -> Namespace:
    return Namespace(
        **(
            {"quick": True, "device": "cpu", "repeats": 1, "threads": 1, "wide": False, "trace": False}
            | dict.fromkeys(SIZES["quick"])
            | given
        )
    )


# 105 and 669 tokens would leave a last sequence of one token.
@pytest.mark.parametrize(
    "size", [*SIZES.values(), SIZES["cuda"] | WIDE, *(SIZES["quick"] | {"tokens": n} for n in (105, 147, 669))]
)
def test_the_sequences_fill_the_step_and_fit_into_its_rows(size: dict[str, int]) -> None:
    lengths = lengths_of(size)
    assert sum(lengths) == size["tokens"]
    assert min(lengths) >= 2 and max(lengths) <= size["longest"]
    work = make_work(model_config(size), lengths, size["row"], "float32", torch.device("cpu"))
    ends = torch.tensor(work.micro_sizes).cumsum(0).tolist()
    rows = [sum(lengths[end - count : end]) for end, count in zip(ends, work.micro_sizes, strict=True)]
    assert sum(work.micro_sizes) == len(lengths)
    assert all(0 < row <= size["row"] for row in rows)


def test_loops_that_do_not_do_the_same_are_no_comparison() -> None:
    check_alike({"megarl": 1.0, "megatron-core": 1.00005}, "float32")
    check_alike({"megarl": 1.0, "megatron-core": 1.01}, "bfloat16")
    with pytest.raises(ValueError, match="norms are 1 and 1.01; expected the same to 0.0001 in float32"):
        check_alike({"megarl": 1.0, "megatron-core": 1.01}, "float32")


def test_the_weights_of_the_step_are_a_mean_over_its_completions() -> None:
    work = make_work(model_config(SIZES["quick"]), [8, 12], 16, "float32", torch.device("cpu"))
    columns = work.batch.columns
    assert columns["weight"].sum().item() == pytest.approx(1)
    assert columns["response_mask"].tolist() == [0] * 2 + [1] * 6 + [0] * 3 + [1] * 9
    assert work.micro_sizes == [1, 1]


def test_the_arithmetic_is_that_of_the_weights_and_of_causal_attention() -> None:
    size = {"hidden": 64, "heads": 2, "head": 32, "layers": 1, "ffn": 100, "vocab": 500, "longest": 10}
    layer = 64 * 32 * (2 + 1 + 1 + 2) + 3 * 64 * 100  # two heads of 32, one pair of keys and values
    assert step_flops(size, [10]) == 6 * (layer + 64 * 500) * 10 + 6 * 64 * 10**2
    assert head_share(size) == 64 * 500 / (layer + 64 * 500)


def test_mfu_is_of_the_gpus_data_sheet_if_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_step.gpu_peak("cpu") == (None, [])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert bench_step.gpu_peak("cuda") == (989.4e12, ["MFU: of the 989 TFLOP/s of h200's data sheet"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA T4")
    peak, (note,) = bench_step.gpu_peak("cuda")
    assert peak is None and note.startswith("no MFU: gpu=NVIDIA T4: what it can do is not known")


def test_both_loops_make_the_same_gradient_and_the_ratio_comes_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(machine.MATRIX, "cpu", 128)
    found = bench_step.measure(options(tokens=128, row=64, trace=True, out=tmp_path))
    ours, bare = found.rows
    assert (ours["loop"], bare["loop"]) == ("megarl", "megatron-core")
    assert ours["first gradient norm"] == pytest.approx(bare["first gradient norm"], rel=1e-5)
    assert list(found.ratios)[-1] == "step_vs_megatron"
    assert found.ratios["step_vs_megatron"] == pytest.approx(bare["seconds"] / ours["seconds"])
    assert found.configuration["sequences of each row"] == "[1, 1, 1]"
    assert found.configuration["cross entropy of the bare loop"] == "plain" and found.configuration["goal"] == 0.97
    assert {file.name for file in tmp_path.iterdir()} == {"step_megarl.json.gz", "step_megatron-core.json.gz"}
    assert not dist.is_initialized()
