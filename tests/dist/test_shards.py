"""A checkpoint written under one layout goes on under another as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from shards_cases import all_cases
from spawn import Ranks

from megarl.data.examples.tiny import write_tiny_model
from megarl.layout import Layout, padded_vocab_size
from megarl.plan.job import Role
from megarl.plan.memory.host import saved_bytes

pytestmark = pytest.mark.dist
SHAPE = {"hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}
# name: optimizer, type, role, saved under, loaded under, steps before
CASES: dict[str, Any] = {
    "plain": ("adamw", "float32", "actor", "tp2", ["tp2", "pp2", "dp2"], 2),
    "sharded": ("adamw", "float32", "actor", "tp2 sharded", ["tp2 sharded", "pp2 sharded", "dp2 sharded", "dp2"], 2),
    "interleaved": (
        "adamw",
        "float32",
        "actor",
        "pp2 vpp2",
        ["pp2 vpp2", "pp2", "tp2", "pp2 uneven", "dp2 sharded"],
        2,
    ),
    "to interleaved": ("adamw", "float32", "actor", "tp2", ["pp2 vpp2"], 2),
    "interleaved sharded": ("adamw", "float32", "actor", "pp2 vpp2 sharded", ["pp2 vpp2 sharded", "dp2 sharded"], 2),
    "interleaved critic": ("sgd", "float32", "critic", "pp2 vpp2", ["dp2"], 2),
    "critic": ("adamw", "float32", "critic", "pp2", ["tp2"], 2),
    "bf16": ("adamw", "bfloat16", "actor", "tp2", ["tp2"], 2),
    "bf16 sharded": ("adamw", "bfloat16", "actor", "dp2 sharded", ["dp2 sharded", "dp2"], 2),
    "sgd": ("sgd", "float32", "actor", "tp2", ["pp2"], 2),
    # As an actor is saved while the critic warms up alone.
    "before the first step": ("sgd", "float32", "actor", "tp2", ["tp2"], 0),
    "bf16 before the first step": ("adamw", "bfloat16", "actor", "tp2", ["tp2"], 0),
    "bf16 sharded before the first step": ("adamw", "bfloat16", "actor", "dp2 sharded", ["dp2 sharded"], 0),
}
PAIRS = [(name, layout) for name, case in CASES.items() for layout in case[4]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), seed=1, **SHAPE)


@pytest.fixture(scope="module")
def ranks(two_ranks: Ranks, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("checkpoints")
    return two_ranks.run(all_cases, str(folder), str(root), CASES, timeout_s=120)


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(got) == sorted(expected)
    wrong = [name for name in expected if not torch.equal(got[name], expected[name])]
    assert not wrong, f"{len(wrong)} of {len(expected)} differ: {wrong[:3]}"


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_weights_and_moments_come_back_bit_for_bit(ranks: list, case: str, layout: str) -> None:
    saved, loaded = ranks[0][case]["saved"], ranks[0][case][layout]
    assert_same(loaded["weights"], saved["weights"])
    assert loaded["moments"].keys() == saved["moments"].keys()
    for kind, expected in saved["moments"].items():
        assert_same(loaded["moments"][kind], expected)


@pytest.mark.parametrize(
    "case", ["plain", "sharded", "interleaved", "interleaved sharded", "critic", "bf16", "bf16 sharded", "sgd"]
)
def test_moments_are_there_and_not_all_zero(ranks: list, case: str) -> None:
    moments = ranks[0][case]["saved"]["moments"]
    assert set(moments) == ({"momentum_buffer"} if CASES[case][0] == "sgd" else {"exp_avg", "exp_avg_sq"})
    for whole in moments.values():
        assert all(tensor.any() for name, tensor in whole.items() if "bias" not in name)


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_the_next_step_is_the_one_it_would_have_been(ranks: list, case: str, layout: str) -> None:
    saved, loaded = ranks[0][case]["saved"], ranks[0][case][layout]
    assert loaded["lr"] == saved["lr"]
    if layout == CASES[case][3]:
        assert_same(loaded["weights after"], saved["weights after"])
        return
    # Another layout sums gradients in another order; the moments, unlike Adam's weights, show that by no more than it.
    for kind, expected in saved["moments after"].items():
        scale = max(tensor.abs().max().item() for tensor in expected.values())
        for name, tensor in expected.items():
            error = (loaded["moments after"][kind][name] - tensor).abs().max().item() / scale
            assert error < 1e-4, f"{kind} of {name}: relative error {error:.1e}"


def test_the_step_is_restored_on_every_rank(ranks: list) -> None:
    for case, layout in PAIRS:
        num_steps = CASES[case][5]
        for rank in ranks:
            assert rank[case][layout]["step_index"] == num_steps
            if CASES[case][0] == "adamw":
                assert rank[case][layout]["adam steps"] == [num_steps + 1], "one more than before, in every parameter"
            assert rank[case][layout]["lr"] == pytest.approx(1e-2 * (1 - num_steps / 10))


def test_a_frozen_model_is_saved_without_an_optimizer(ranks: list) -> None:
    saved = ranks[0]["before the first step"]["saved"]["weights"]
    assert_same(ranks[0]["frozen"], saved)


def test_a_folder_without_a_checkpoint_is_refused_in_one_sentence(ranks: list) -> None:
    for rank in ranks:
        assert rank["empty"].endswith("there is no checkpoint here; expected a folder that a save has finished")


def test_the_checkpoint_of_another_optimizer_is_refused_in_one_sentence(ranks: list) -> None:
    for rank in ranks:
        assert rank["other"].endswith(
            "its optimizer had optim.name=adamw model.dtype=float32, this one has optim.name=sgd model.dtype=float32; "
            "expected the same settings"
        )


def test_saving_leaves_no_process_behind(ranks: list) -> None:
    assert [rank["children"] for rank in ranks] == [[], []]


def test_checkpoint_peak_is_an_equal_share_of_each_rank_and_nothing_is_gathered(ranks: list, folder: Path) -> None:
    """Weights 2 bytes, master weights 4, two moments 8; what the planner counts, and a few rows of padding."""
    hf = json.loads((folder / "config.json").read_text())
    peaks = [rank["peak"] for rank in ranks]
    assert sum(peak["bytes"] for peak in peaks) == 14 * peaks[0]["params"]
    assert max(peak["bytes"] for peak in peaks) < 1.05 * min(peak["bytes"] for peak in peaks)
    assert [peak["gathers"] for peak in peaks] == [[], []]
    planned = saved_bytes(Role("actor", hf, Layout(), 2, max_tokens=1, log_prob_tokens=1))
    padding = padded_vocab_size(hf["vocab_size"], 1) - hf["vocab_size"]
    assert 14 * peaks[0]["params"] - planned == 14 * padding * hf["hidden_size"]
