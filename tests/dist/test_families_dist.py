"""Every family at mixed layouts: HF -> Megatron -> HF bit for bit, and log-probs against those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import LENGTHS, run_cases, tokens
from safetensors.torch import load_file
from spawn import run_ranks
from tiny_models import FAMILIES, write_model
from transformers import AutoModelForCausalLM

from megarl.data.hf_config import read_config

pytestmark = [pytest.mark.slow, pytest.mark.dist]

DENSE: dict[str, dict[str, Any]] = {
    "tp2pp2": {"tp": 2, "pp": 2},
    "tp2cp2+sp": {"tp": 2, "cp": 2, "sequence_parallel": True},
    "pp2dp2 vpp2": {"pp": 2, "vpp": 2},
}
SPARSE: dict[str, dict[str, Any]] = {
    "tp2pp2 etp2": {"tp": 2, "pp": 2},
    "tp2pp2 ep2 etp1": {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
    "pp2dp2 ep2": {"pp": 2, "ep": 2},
    "dp4 ep4": {"ep": 4},
    "dp4 ep2 etp2": {"ep": 2, "etp": 2},
    "tp2dp2 ep4 etp1": {"tp": 2, "ep": 4, "etp": 1},
    "tp2cp2+sp ep2": {"tp": 2, "cp": 2, "ep": 2, "sequence_parallel": True},
    "pp2dp2 vpp2 ep2": {"pp": 2, "vpp": 2, "ep": 2},
}
SOME_SPARSE = ("tp2pp2 ep2 etp1", "dp4 ep2 etp2", "tp2cp2+sp ep2", "pp2dp2 vpp2 ep2")
NEW = [family for family in FAMILIES if family not in ("qwen2", "qwen3")]
LAYOUTS = dict.fromkeys(NEW, DENSE) | {
    "qwen3_moe": SPARSE,
    "qwen3_moe_plain": {"pp2dp2 ep2": SPARSE["pp2dp2 ep2"]},
    "mixtral": {name: SPARSE[name] for name in SOME_SPARSE},
    "deepseek_v3": {name: SPARSE[name] for name in SOME_SPARSE},
    "kimi_k2": {name: SPARSE[name] for name in ("tp2pp2 ep2 etp1", "tp2cp2+sp ep2")},
    "glm4_moe": {name: SPARSE[name] for name in SOME_SPARSE},
    "glm4_moe_air": {"dp4 ep2 etp2": SPARSE["dp4 ep2 etp2"]},
    "minimax_m2": {name: SPARSE[name] for name in SOME_SPARSE},
    "gpt_oss": {name: SPARSE[name] for name in ("tp2pp2 ep2 etp1", "dp4 ep4", "pp2dp2 vpp2 ep2")}
    | {"tp2cp2+sp ep2 etp1": {"tp": 2, "cp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}},
    "deepseek_v3_plain": {"pp2dp2 ep2": SPARSE["pp2dp2 ep2"]},
}
ON_FOUR = [(family, name, layout) for family in NEW for name, layout in LAYOUTS[family].items()]
ON_ONE: list[tuple[str, str, dict[str, Any]]] = [(family, "one", {}) for family in NEW]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for family in NEW:
        write_model(root / family, family, tied=family == "llama3")
    return root


@pytest.fixture(scope="module")
def by_rank(root: Path) -> dict[int, list[dict[str, Any]]]:
    """Number of ranks -> what each of them saw of all its cases."""
    return {n: run_ranks(n, run_cases, str(root), cases, timeout_s=240) for n, cases in ((1, ON_ONE), (4, ON_FOUR))}


def hf_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(got) == sorted(expected)
    assert not [n for n in expected if got[n].dtype != expected[n].dtype or not torch.equal(got[n], expected[n])]


@pytest.mark.parametrize(("family", "layout"), [case[:2] for case in ON_ONE + ON_FOUR])
def test_every_rank_streams_what_the_folder_held(by_rank: dict, root: Path, family: str, layout: str) -> None:
    expected = hf_weights(root / family)
    for rank in by_rank[1 if layout == "one" else 4]:
        assert_same(rank[f"{family}/{layout}"]["tensors"], expected)
    assert_same(hf_weights(root / f"{family}_{layout}"), expected)


def reference(folder: Path) -> torch.Tensor:
    """Log-probs of each sequence by itself, 0 where nothing predicts a token."""
    config = read_config(str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    columns = []
    for ids in tokens().split(LENGTHS):
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0].log_softmax(-1)
        columns += [torch.zeros(1), log_probs[:-1].gather(1, ids[1:, None])[:, 0]]
    return torch.cat(columns)


@pytest.mark.parametrize("family", NEW)
def test_log_probs_equal_those_of_transformers(by_rank: dict, root: Path, family: str) -> None:
    """Float32 on both sides: measured differences are below 3e-6, of log-probs around -4."""
    layouts = list(LAYOUTS[family])
    expected = reference(root / f"{family}_{layouts[-1]}")
    assert expected.std() > 0.5
    for ranks, names in ((by_rank[1], ["one"]), (by_rank[4], layouts)):
        for name in names:
            seen = [found for rank in ranks if (found := rank[f"{family}/{name}"]["log_probs"]) is not None]
            assert seen
            for log_probs in seen:
                torch.testing.assert_close(log_probs, expected, atol=1e-4, rtol=0)
