"""HF -> Megatron -> HF on gloo ranks, bit for bit, and Megatron's log-probs against those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from spawn import run_ranks
from tiny_models import write_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from weights_cases import LAYOUTS, LENGTHS, MODELS, all_cases, model_name, tokens

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for family, tied in MODELS:
        write_model(root / model_name(family, tied), family, tied=tied, max_shard_size="30KB")
    return root


@pytest.fixture(scope="module")
def by_rank(root: Path) -> list[dict[str, Any]]:
    """All cases in two processes: starting ranks costs more than all of them."""
    return run_ranks(2, all_cases, str(root), timeout_s=120)


def hf_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(got) == sorted(expected)
    wrong = [n for n in expected if got[n].dtype != expected[n].dtype or not torch.equal(got[n], expected[n])]
    assert not wrong


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_round_trip_is_bit_exact_on_every_rank(by_rank: list, root: Path, layout: str, family: str, tied: bool) -> None:
    name = model_name(family, tied)
    expected = hf_weights(root / name)
    assert ("lm_head.weight" in expected) != tied
    for rank in (0, 1):
        assert_same(by_rank[rank][f"{layout}/{name}"]["tensors"], expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_saved_folder_equals_its_source(by_rank: list, root: Path, layout: str, family: str, tied: bool) -> None:
    name = model_name(family, tied)
    saved = root / f"saved_{layout}_{name}"
    assert_same(hf_weights(saved), hf_weights(root / name))
    assert len(list(saved.glob("model-*-of-*.safetensors"))) > 1
    assert json.loads((saved / "config.json").read_text()) == json.loads((root / name / "config.json").read_text())
    assert (saved / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not list(saved.glob("*.partial"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_log_probs_equal_those_of_transformers(by_rank: list, root: Path, layout: str, family: str, tied: bool) -> None:
    name = model_name(family, tied)
    reference = AutoModelForCausalLM.from_pretrained(root / f"saved_{layout}_{name}", dtype=torch.float32).eval()
    expected = []
    for ids in tokens().split(LENGTHS):
        with torch.no_grad():
            log_probs = reference(ids[None]).logits[0].log_softmax(-1)
        expected += [torch.zeros(1), log_probs[:-1].gather(1, ids[1:, None])[:, 0]]
    last = by_rank[1][f"{layout}/{name}"]["log_probs"]
    torch.testing.assert_close(last, torch.cat(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_critic_takes_an_actors_trunk_and_its_own_head(by_rank: list, root: Path, layout: str) -> None:
    trunk = {n: t for n, t in hf_weights(root / "qwen3_tied").items() if n != "lm_head.weight"}
    for rank in (0, 1):
        case = by_rank[rank][f"{layout}/critic"]
        assert torch.equal(case["head"], torch.zeros(1, 32))  # the folder has none: as the model code made it
        assert_same(case["tensors"], trunk | {"score.weight": torch.arange(32.0)[None]})


def test_transformers_loads_a_saved_critic(by_rank: list, root: Path) -> None:
    model, info = AutoModelForSequenceClassification.from_pretrained(root / "critic_tp2", output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(model.score.weight, torch.arange(32.0)[None])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_models_are_exported_as_rounded_once(by_rank: list, root: Path, layout: str) -> None:
    expected = {n: t.to(torch.bfloat16) for n, t in hf_weights(root / "qwen2_tied").items()}
    assert_same(by_rank[0][f"{layout}/bf16"], expected)
