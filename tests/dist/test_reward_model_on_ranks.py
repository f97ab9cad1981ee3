"""A reward model on ranks gives the scores of transformers' sequence classifiers, however it is split."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, Qwen2Config, Qwen3Config

from megarl.arch.layout import Layout
from megarl.group import Group, GroupSettings
from megarl.roles.frozen import RewardModel
from megarl.roles.settings import Packing

pytestmark = [pytest.mark.dist, pytest.mark.full]

KINDS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
LAYOUTS = {"tp": Layout(tp=2), "pp": Layout(pp=2), "cp": Layout(cp=2), "dp": Layout()}
GENERATOR = torch.Generator().manual_seed(0)
SEQUENCES = [torch.randint(1, 40, (size,), generator=GENERATOR).tolist() for size in (5, 17, 2, 9, 1, 12)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weights that are large enough for scores to differ."""
    found = {}
    for name, config in KINDS.items():
        torch.manual_seed(3)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40, "head_dim": 8}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        more = {"num_labels": 1, "initializer_range": 0.3, "pad_token_id": 0, "tie_word_embeddings": False}
        found[name] = tmp_path_factory.mktemp(name)
        model = AutoModelForSequenceClassification.from_config(config(**sizes, **heads, **more))
        model.save_pretrained(found[name])
    return found


@pytest.fixture(scope="module", params=LAYOUTS)
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    logs = tmp_path_factory.mktemp("logs")
    settings = GroupSettings(device="cpu", start_timeout_s=300)
    with Group(request.param, 2, LAYOUTS[request.param], settings, log_dir=logs) as ranks:
        ranks.start()
        yield ranks


@torch.inference_mode()
def transformers_scores(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    return torch.stack([model(torch.tensor([tokens])).logits[0, 0] for tokens in SEQUENCES]).double()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_transformers(group: Group, folders: dict[str, Path], kind: str) -> None:
    """The error of float32 is told by transformers' own, with another order of summation some times that."""
    exact = transformers_scores(folders[kind], torch.float64)
    rounding = (transformers_scores(folders[kind], torch.float32) - exact).abs().max()
    model = RewardModel(f"{kind}_scores", group, Packing(max_tokens=24))
    model.load(str(folders[kind]))
    scores = torch.tensor(model.scores(SEQUENCES), dtype=torch.float64)
    assert exact.std() > 1000 * rounding > 0
    assert (scores - exact).abs().max() <= 16 * rounding
