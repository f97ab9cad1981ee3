"""The benchmark of the training step: both loops do the same, its arithmetic, and a whole small run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import bench_step
import machine
import pytest
import torch
import torch.distributed as dist
from bench_step import SIZES, check_alike, head_share, lengths_of, model_config, step_flops
from step_loops import make_work

ROOT = Path(__file__).parents[2]


def options(**given: Any) -> Namespace:
    return Namespace(
        **({"quick": True, "device": "cpu", "repeats": 1, "threads": 1} | dict.fromkeys(SIZES["quick"]) | given)
    )


@pytest.mark.parametrize("name", SIZES)
def test_the_sequences_fill_the_step_and_fit_into_its_rows(name: str) -> None:
    size = SIZES[name]
    lengths = lengths_of(size)
    assert sum(lengths) == size["tokens"]
    assert min(lengths) >= 2 and max(lengths) <= size["longest"]
    work = make_work(model_config(size), lengths, size["row"], "float32", torch.device("cpu"))
    ends = torch.tensor(work.micro_sizes).cumsum(0).tolist()
    rows = [sum(lengths[end - count : end]) for end, count in zip(ends, work.micro_sizes, strict=True)]
    assert sum(work.micro_sizes) == len(lengths)
    assert all(0 < row <= size["row"] for row in rows)


@pytest.mark.parametrize("tokens", [105, 147, 669])
def test_no_sequence_of_one_token_is_left_over(tokens: int) -> None:
    size = SIZES["quick"] | {"tokens": tokens}
    lengths = lengths_of(size)
    assert sum(lengths) == tokens and min(lengths) >= 2 and max(lengths) <= size["longest"]


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
    size = {"hidden": 64, "layers": 1, "ffn": 100, "vocab": 500, "tokens": 10, "longest": 10, "row": 10}
    layer = 64 * 32 * (2 + 1 + 1 + 2) + 3 * 64 * 100  # two heads of 32, one pair of keys and values
    assert step_flops(size, [10]) == 6 * (layer + 64 * 500) * 10 + 6 * 64 * 10**2
    assert head_share(size) == 64 * 500 / (layer + 64 * 500)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"longest": 512}, "--longest 512: expected at most --row 128 and --tokens 256"),
        ({"hidden": 100}, "--hidden 100, --longest 64: expected a multiple of 64"),
    ],
)
def test_sizes_that_cannot_be_are_refused(given: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        bench_step.measure(options(**given))


def test_mfu_is_of_the_gpus_data_sheet_if_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_step.gpu_peak("cpu") == (None, [])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert bench_step.gpu_peak("cuda") == (989.4e12, ["MFU: of the 989 TFLOP/s of h200's data sheet"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA T4")
    peak, (note,) = bench_step.gpu_peak("cuda")
    assert peak is None and note.startswith("no MFU: gpu=NVIDIA T4: what it can do is not known")


def test_both_loops_make_the_same_gradient_and_the_ratio_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.MATRIX, "cpu", 128)
    found = bench_step.measure(options(tokens=128, row=64))
    ours, bare = found.rows
    assert (ours["loop"], bare["loop"]) == ("megarl", "megatron-core")
    assert ours["first gradient norm"] == pytest.approx(bare["first gradient norm"], rel=1e-5)
    assert list(found.ratios)[-1] == "step_vs_megatron"
    assert found.ratios["step_vs_megatron"] == pytest.approx(bare["seconds"] / ours["seconds"])
    assert found.configuration["sequences of each row"] == "[1, 1, 1]"
    assert found.configuration["cross entropy of the bare loop"] == "plain" and found.configuration["goal"] == 0.97
    assert not dist.is_initialized()


@pytest.mark.slow
def test_the_script_ends_with_one_line_of_json(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/bench_step.py"), "--device", "cpu", "--quick", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, "--threads", "1", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert list(said)[-1] == "step_vs_megatron" and said["step_vs_megatron"] > 0
    assert len(list(tmp_path.iterdir())) == 2
