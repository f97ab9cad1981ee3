"""Filling parameters from safetensors files, without a model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.layout import RANDOM_WEIGHTS
from megarl.weights.hf.folder import open_hf
from megarl.weights.hf.load import check_names, check_tied, fill, load_hf
from megarl.weights.mapping.names import Op, Rename, ShardCoordinate, ValueHead, Vocab

EMBED = Vocab("embedding.word_embeddings.weight", "embed", 5, 2, 2, copies=("output_layer.weight",))
TABLE: list[Op] = [EMBED, Rename("proj", "o_proj", (2, 4), 1), Rename("norm", "norm", (2,))]
TENSORS = {
    "embed": torch.arange(10.0).reshape(5, 2),
    "o_proj": torch.arange(20.0, 28.0).reshape(2, 4),
    "norm": torch.tensor([7.0, 8.0]),
}


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def test_a_rank_takes_its_slices_and_zeroes_the_padding(tmp_path: Path) -> None:
    params = {
        "embedding.word_embeddings.weight": torch.full((4, 2), -1.0),
        "proj": torch.empty(2, 2),
        "norm": torch.empty(2),
    }
    with open_hf(write(tmp_path, TENSORS)) as folder:
        check_names(folder, TABLE, set())
        fill(params, TABLE, folder, ShardCoordinate(tp_rank=1, tp=2))
    assert params["embedding.word_embeddings.weight"].tolist() == [[8, 9], [0, 0], [0, 0], [0, 0]]
    assert params["proj"].tolist() == [[22, 23], [26, 27]]
    assert params["norm"].tolist() == [7, 8]


def test_a_last_stage_fills_its_copy_of_the_embedding(tmp_path: Path) -> None:
    params = {"output_layer.weight": torch.empty(6, 2)}
    with open_hf(write(tmp_path, TENSORS)) as folder:
        fill(params, TABLE, folder, ShardCoordinate())
    assert torch.equal(params["output_layer.weight"][:5], TENSORS["embed"])


def test_another_type_in_the_file_is_converted(tmp_path: Path) -> None:
    params = {"norm": torch.empty(2)}
    with open_hf(write(tmp_path, {"norm": torch.tensor([7, 8], dtype=torch.bfloat16)})) as folder:
        fill(params, TABLE[2:], folder, ShardCoordinate())
    assert params["norm"].tolist() == [7, 8]


def test_missing_extra_and_misshapen_tensors_are_listed(tmp_path: Path) -> None:
    wrong = {
        "embed": TENSORS["embed"],
        "o_proj": torch.zeros(2, 5),
        "bias": torch.zeros(1),
        "lm_head.weight": torch.zeros(1),
    }
    with open_hf(write(tmp_path, wrong)) as folder, pytest.raises(ValueError) as caught:
        check_names(folder, TABLE, {"lm_head.weight"})
    message = str(caught.value)
    assert "missing: norm;" in message
    assert "not of this model: bias;" in message
    assert "of another shape: o_proj (has [2, 5], expected [2, 4])" in message
    assert "lm_head" not in message


EXPERTS: list[Op] = [
    Rename(f"experts.local_experts.{i}.fc2", f"experts.{i}.down", (2, 4), 1, axis="etp", expert=(i, 4))
    for i in range(4)
]


def test_a_rank_takes_its_columns_of_its_own_experts(tmp_path: Path) -> None:
    coordinate = ShardCoordinate(tp_rank=0, tp=1, ep_rank=1, ep=2, etp_rank=1, etp=2)
    tensors = {f"experts.{i}.down": torch.arange(8.0).reshape(2, 4) + 10 * i for i in range(4)}
    params = {op.param: torch.empty(op.shape_at(coordinate)) for op in EXPERTS if op.held_by(coordinate)}
    with open_hf(write(tmp_path, tensors)) as folder:
        check_names(folder, EXPERTS, set())
        fill(params, EXPERTS, folder, coordinate)
        with pytest.raises(AssertionError, match=r"the table says it is another expert rank's"):
            fill({"experts.local_experts.0.fc2": torch.empty(2, 2)}, EXPERTS, folder, coordinate)
    assert list(params) == ["experts.local_experts.2.fc2", "experts.local_experts.3.fc2"]
    assert params["experts.local_experts.2.fc2"].tolist() == [[22, 23], [26, 27]]


def test_experts_that_are_missing_too_many_or_misshapen_are_listed(tmp_path: Path) -> None:
    tensors = {f"experts.{i}.down": torch.zeros(2, 4) for i in (0, 1, 4)} | {"experts.2.down": torch.zeros(4, 2)}
    with open_hf(write(tmp_path, tensors)) as folder, pytest.raises(ValueError) as caught:
        check_names(folder, EXPERTS, set())
    message = str(caught.value)
    assert "missing: experts.3.down;" in message
    assert "not of this model: experts.4.down;" in message
    assert "of another shape: experts.2.down (has [4, 2], expected [2, 4])" in message


def test_long_lists_are_cut(tmp_path: Path) -> None:
    table = [Rename(f"p{i}", f"t{i}", (1,)) for i in range(12)]
    with open_hf(write(tmp_path, {"t0": torch.zeros(1)})) as folder, pytest.raises(ValueError, match=r"t8 and 3 more$"):
        check_names(folder, table, set())


def test_a_missing_value_head_leaves_the_models_own(tmp_path: Path) -> None:
    table: list[Op] = [TABLE[2], ValueHead("output_layer.weight", "score.weight", (1, 2))]
    params = {"norm": torch.empty(2), "output_layer.weight": torch.full((1, 2), 3.0)}
    with open_hf(write(tmp_path, {"norm": TENSORS["norm"]})) as folder:
        check_names(folder, table, set())
        fill(params, table, folder, ShardCoordinate())
    assert params["output_layer.weight"].tolist() == [[3, 3]]


def test_output_rows_beside_tied_embeddings_must_be_the_same_rows(tmp_path: Path) -> None:
    with open_hf(write(tmp_path, TENSORS | {"lm_head": TENSORS["embed"].clone()})) as folder:
        check_tied(folder, {"lm_head": "embed"}, TABLE, ShardCoordinate())
    with (
        open_hf(write(tmp_path, TENSORS | {"lm_head": TENSORS["embed"] + 1})) as folder,
        pytest.raises(ValueError, match="lm_head differs from embed though config.json says tie_word_embeddings=true"),
    ):
        check_tied(folder, {"lm_head": "embed"}, TABLE, ShardCoordinate())


def test_an_unknown_parameter_of_the_model_is_named(tmp_path: Path) -> None:
    with open_hf(write(tmp_path, TENSORS)) as folder, pytest.raises(AssertionError, match="no mapping for router"):
        fill({"router": torch.empty(1)}, TABLE, folder, ShardCoordinate())


def test_where_config_json_says_that_weights_are_random_none_are_read(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.warns(UserWarning, match=f"{tmp_path}: its config.json says {RANDOM_WEIGHTS}; NOTHING IS LOADED"):
        load_hf([model], tmp_path, {RANDOM_WEIGHTS: True})
    assert torch.equal(model.weight, before)


def test_a_folder_that_says_that_its_weights_are_random_must_have_none(tmp_path: Path) -> None:
    write(tmp_path, TENSORS)
    with pytest.raises(ValueError, match=f"says {RANDOM_WEIGHTS}, yet there are weights; expected one of the two"):
        load_hf([torch.nn.Linear(2, 2)], tmp_path, {RANDOM_WEIGHTS: True})


def test_a_folder_without_weights_or_with_a_lost_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds neither model\.safetensors nor"), open_hf(tmp_path):
        pass
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"not there: model-00002-of-00002\.safetensors"), open_hf(tmp_path):
        pass
