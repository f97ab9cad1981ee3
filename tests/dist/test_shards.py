"""A checkpoint written under one layout goes on under another as if nothing had happened."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_compare import TOLERANCE, assert_same_bits, relative
from rank_answers import Answers
from shards_cases import OPTIMIZERS, run_cases, run_others
from spawn import Ranks
from tiny_models import FAMILIES, write_model

from megarl.arch.layout import Layout, padded_vocab_size
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.plan.host import saved_bytes
from megarl.plan.job import Role

pytestmark = pytest.mark.dist
SHAPE = TinySizes(hidden=32, layers=4, heads=4, kv_heads=2, head_dim=8, ffn=48)
# name: optimizer, type, role, saved under, loaded under, steps before
CASES: dict[str, Any] = {
    "plain": ("adamw", "float32", "actor", "tp2", ["tp2", "dp2"], 2),
    "interleaved sharded": ("adamw", "float32", "actor", "pp2 vpp2 sharded", ["pp2 vpp2 sharded", "dp2 sharded"], 2),
    "experts sharded": ("smooth adamw", "float32", "actor", "ep2 etp1 sharded", ["ep2 sharded"], 1),
    "bf16 sharded": ("adamw", "bfloat16", "actor", "dp2 sharded", ["dp2 sharded", "dp2"], 2),
    # As an actor is saved while the critic warms up alone.
    "bf16 before the first step": ("adamw", "bfloat16", "actor", "tp2", ["tp2"], 0),
}
# Of a few parameters in float32 among those in bfloat16.
STATES: dict[str, Any] = {
    "states tp2": ("adamw", "bfloat16", "actor", "tp2 sharded", ["tp2 sharded", "tp2"], 1),
    "states dp2": ("adamw", "bfloat16", "actor", "dp2 sharded", ["dp2 sharded", "dp2"], 1),
    "mamba dp2": ("adamw", "bfloat16", "actor", "dp2 sharded", ["dp2 sharded", "dp2"], 1),
}
SLOW: dict[str, Any] = {
    "critic": ("adamw", "float32", "critic", "pp2", ["tp2"], 2),
    "sharded": ("adamw", "float32", "actor", "tp2 sharded", ["tp2 sharded", "pp2 sharded", "dp2"], 2),
    "interleaved": ("adamw", "float32", "actor", "pp2 vpp2", ["pp2", "tp2", "pp2 uneven", "dp2 sharded"], 2),
    "to interleaved": ("adamw", "float32", "actor", "tp2", ["pp2 vpp2"], 2),
    "interleaved critic": ("sgd", "float32", "critic", "pp2 vpp2", ["dp2"], 2),
    "experts": ("smooth adamw", "float32", "actor", "ep2", ["ep2 etp1"], 1),
    "experts together": ("smooth adamw", "float32", "actor", "ep2 sharded", ["dp2"], 1),
    "experts apart": ("smooth adamw", "float32", "actor", "pp2", ["ep2 sharded"], 1),
    "bf16": ("adamw", "bfloat16", "actor", "tp2", ["tp2"], 2),
    "sgd": ("sgd", "float32", "actor", "tp2", ["pp2"], 2),
    "before the first step": ("sgd", "float32", "actor", "tp2", ["tp2"], 0),
    "bf16 sharded before the first step": ("adamw", "bfloat16", "actor", "dp2 sharded", ["dp2 sharded"], 0),
}
ALL, OF_STATES = CASES | SLOW | STATES, (pytest.mark.full, pytest.mark.megatron_0_19)
PAIRS = [
    pytest.param(name, layout, marks=marks)
    for cases, marks in ((CASES, ()), (SLOW, pytest.mark.full), (STATES, OF_STATES))
    for name, case in cases.items()
    for layout in case[4]
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where models are, by name."""
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "dense", SHAPE, seed=1)
    write_tiny_model(root / "experts", replace(SHAPE, layers=2), family="qwen3_moe", seed=1, moe_intermediate_size=24)
    for name, family in {"states": "qwen3_5_text", "mamba": "nemotron_h_dense"}.items():
        if family in FAMILIES:
            write_model(root / name, family, tied=False)
    return {folder.name: str(folder) for folder in root.iterdir()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def found(two_ranks: Ranks, folders: dict[str, str], root: str) -> Answers:
    run = partial(two_ranks.run, run_cases, folders, root, timeout_s=240)
    return Answers(*((cases, partial(run, cases)) for cases in (CASES, SLOW, STATES)))


@pytest.fixture(scope="module")
def others(two_ranks: Ranks, folders: dict[str, str], root: str, found: Answers) -> list[dict[str, Any]]:
    assert found["plain"]
    return two_ranks.run(run_others, folders["dense"], folders["experts"], root, f"{root}/plain", timeout_s=120)


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_weights_and_moments_come_back_bit_for_bit(found: Answers, name: str, layout: str) -> None:
    (optim, _, _, _, _, num_steps), (rank, *_) = ALL[name], found[name]
    saved, loaded = rank["saved"], rank[layout]
    assert_same_bits(loaded["weights"], saved["weights"])
    assert loaded["moments"].keys() == saved["moments"].keys()
    if num_steps:
        assert set(saved["moments"]) == ({"momentum_buffer"} if optim == "sgd" else {"exp_avg", "exp_avg_sq"})
    for kind, expected in saved["moments"].items():
        assert_same_bits(loaded["moments"][kind], expected)
        assert all(tensor.any() for n, tensor in expected.items() if "bias" not in n) or not num_steps


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_the_next_step_is_the_one_it_would_have_been(found: Answers, name: str, layout: str) -> None:
    (optim, _, _, first, _, num_steps), ranks = ALL[name], found[name]
    for rank in ranks:
        assert rank[layout]["step_index"] == num_steps
        if "adamw" in optim:
            assert rank[layout]["adam steps"] == [num_steps + 1], "one more than before, in every parameter"
        assert rank[layout]["lr"] == rank["saved"]["lr"] == pytest.approx(OPTIMIZERS[optim].lr * (1 - num_steps / 10))
    saved, loaded = ranks[0]["saved"], ranks[0][layout]
    if layout == first:
        assert_same_bits(loaded["weights after"], saved["weights after"])
        return
    # Another layout sums gradients in another order; the moments, unlike Adam's weights, show that by no more than it.
    for kind, expected in saved["moments after"].items():
        scale = max(tensor.abs().max().item() for tensor in expected.values())
        for n, tensor in expected.items():
            error = (loaded["moments after"][kind][n] - tensor).abs().max().item() / scale
            assert error < 1e-4, f"{kind} of {n}: relative error {error:.1e}"
    if optim == "smooth adamw":  # as its weights are smooth in the gradient, too
        for n, after in saved["weights after"].items():
            assert relative(loaded["weights after"][n], after) < TOLERANCE, n
            if ".experts." in n:  # Adam's first moment is nearly half of this step, so a lost one would show
                assert relative(saved["weights"][n], after) > 500 * TOLERANCE, f"{n} hardly moved"


@pytest.mark.full
@pytest.mark.megatron_0_19
@pytest.mark.parametrize("name", STATES)
def test_decays_in_float32_are_trained_as_finely_as_their_type(found: Answers, name: str) -> None:
    """In the trainer itself, and without master weights: none of them can be held by bfloat16 after a step."""
    for step in ("weights", "weights after"):
        decays = {n: t for n, t in found[name][0]["saved"][step].items() if n.endswith((".A_log", ".D"))}
        assert decays
        for n, tensor in decays.items():
            assert tensor.dtype == torch.float32
            assert (tensor != tensor.bfloat16()).float().mean() > 0.9, n


def test_weights_alone_move_to_any_layout(others: list[dict[str, Any]]) -> None:
    """Of a frozen model, which is saved without an optimizer."""
    frozen = others[0]["frozen"]
    for name in ("pp2", "ep2 etp1"):
        assert_same_bits(frozen[name], frozen["ep2"])


def test_no_checkpoint_and_that_of_another_optimizer_are_refused_in_one_sentence(others: list[dict[str, Any]]) -> None:
    other = "its optimizer had optim.name=adamw model.dtype=float32, this one has optim.name=sgd model.dtype=float32; "
    for rank in others:
        assert rank["empty"].endswith("there is no checkpoint here; expected a folder that a save has finished")
        assert rank["other"].endswith(f"{other}expected the same settings")


def test_saving_leaves_no_process_behind(others: list[dict[str, Any]]) -> None:
    assert [rank["children"] for rank in others] == [[], []]


def test_checkpoint_peak_is_an_equal_share_of_each_rank_and_nothing_is_gathered(
    others: list[dict[str, Any]], folders: dict[str, str]
) -> None:
    """Weights 2 bytes, master weights 4, two moments 8; what the planner counts, and a few rows of padding."""
    hf = json.loads(Path(folders["dense"], "config.json").read_text())
    peaks = [rank["peak"] for rank in others]
    assert sum(peak["bytes"] for peak in peaks) == 14 * peaks[0]["params"]
    assert max(peak["bytes"] for peak in peaks) < 1.05 * min(peak["bytes"] for peak in peaks)
    assert [peak["gathers"] for peak in peaks] == [[], []]
    planned = saved_bytes(Role("actor", hf, Layout(), 2, max_tokens=1, log_prob_tokens=1))
    padding = padded_vocab_size(hf["vocab_size"], 1) - hf["vocab_size"]
    assert 14 * peaks[0]["params"] - planned == 14 * padding * hf["hidden_size"]
