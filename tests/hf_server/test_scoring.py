"""A reward model on our own server: what it scores, and that a folder without a score head is refused."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_server import CONTEXT, VOCAB, make_model, make_reward_model

from megarl.hf_server.scoring import ScoreModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_reward_model(tmp_path_factory.mktemp("reward"), seed=3)


def test_the_last_token_is_scored_although_it_is_the_padding_token(folder: str) -> None:
    model = ScoreModel(folder, torch.float32)
    (padded,), (bare,) = model.scores([[5, 6, 0], [5, 6]])
    assert abs(padded - bare) > 1e-3


def test_a_folder_without_a_score_head_or_with_a_weight_that_is_not_finite_is_refused(
    folder: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"found no weight score.weight, expected a model for sequence"):
        ScoreModel(make_model(tmp_path, seed=0), torch.float32)
    other = shutil.copytree(folder, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["score.weight"][0, 1] = torch.nan
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"other: the tensor score.weight holds nan; expected finite numbers$"):
        ScoreModel(str(other), torch.float32)


@pytest.mark.parametrize("ids", [None, [], "ab", [1.5], [True], [-1], [VOCAB], [5] * (CONTEXT + 1), [[5]]])
def test_what_is_no_sequence_of_the_vocabulary_is_refused(folder: str, ids: object) -> None:
    with pytest.raises(ValueError, match="^input_ids: "):
        ScoreModel(folder, torch.float32).check(ids)
