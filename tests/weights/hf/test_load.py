"""Folders of safetensors: written, read by slices into parameters without a model, and refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.arch.layout import RANDOM_WEIGHTS
from megarl.weights.hf.export import finish_folder
from megarl.weights.hf.folder import HFWriter, _assign_files, clear_weights, copy_tokenizer, open_hf
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


def filled(
    folder: Path, params: dict[str, torch.Tensor], table: list[Op] = TABLE, at: ShardCoordinate | None = None
) -> dict[str, list[Any]]:
    with open_hf(folder) as held:
        check_names(held, table, ())
        fill(params, table, held, at or ShardCoordinate())
    return {name: param.tolist() for name, param in params.items()}


def test_a_rank_takes_its_slices_and_zeroes_the_padding(tmp_path: Path) -> None:
    embedding = "embedding.word_embeddings.weight"
    params = {embedding: torch.full((4, 2), -1.0), "proj": torch.empty(2, 2), "norm": torch.empty(2)}
    assert filled(write(tmp_path, TENSORS), params, at=ShardCoordinate(tp_rank=1, tp=2)) == {
        embedding: [[8, 9], [0, 0], [0, 0], [0, 0]],
        "proj": [[22, 23], [26, 27]],
        "norm": [7, 8],
    }


def test_a_last_stage_fills_its_copy_of_the_embedding(tmp_path: Path) -> None:
    found = filled(write(tmp_path, TENSORS), {"output_layer.weight": torch.empty(6, 2)})
    assert found["output_layer.weight"][:5] == TENSORS["embed"].tolist()


def test_another_type_in_the_file_is_converted(tmp_path: Path) -> None:
    folder = write(tmp_path, {"norm": torch.tensor([7, 8], dtype=torch.bfloat16)})
    assert filled(folder, {"norm": torch.empty(2)}, TABLE[2:]) == {"norm": [7, 8]}


def test_a_missing_value_head_leaves_the_models_own(tmp_path: Path) -> None:
    table: list[Op] = [TABLE[2], ValueHead("output_layer.weight", "score.weight", (1, 2))]
    params = {"norm": torch.empty(2), "output_layer.weight": torch.full((1, 2), 3.0)}
    assert filled(write(tmp_path, {"norm": TENSORS["norm"]}), params, table)["output_layer.weight"] == [[3, 3]]


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        (
            {"norm": None, "o_proj": torch.zeros(2, 5), "bias": torch.zeros(1), "lm_head.weight": torch.zeros(1)},
            "fit its config.json; missing: norm; not of this model: bias; "
            r"of another shape: o_proj \(has \[2, 5\], expected \[2, 4\]\)$",  # the head may be there
        ),
        ({f"t{i}": torch.zeros(1) for i in range(12)}, r"not of this model: t0, t1, t10, .* t5 and 4 more$"),
        ({"o_proj_scale_inv": torch.ones(1, 1)}, "o_proj_scale_inv says that its weights are in fp8; expected them in"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_with_all_names(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], faults: str
) -> None:
    tensors = {name: tensor for name, tensor in (TENSORS | changes).items() if tensor is not None}
    with open_hf(write(tmp_path, tensors)) as folder, pytest.raises(ValueError, match=faults):
        check_names(folder, TABLE, {"lm_head.weight"})


EXPERTS: list[Op] = [
    Rename(f"experts.local_experts.{i}.fc2", f"experts.{i}.down", (2, 4), 1, axis="etp", expert=(i, 4))
    for i in range(4)
]


def test_a_rank_takes_its_columns_of_its_own_experts(tmp_path: Path) -> None:
    at = ShardCoordinate(tp_rank=0, tp=1, ep_rank=1, ep=2, etp_rank=1, etp=2)
    folder = write(tmp_path, {f"experts.{i}.down": torch.arange(8.0).reshape(2, 4) + 10 * i for i in range(4)})
    params = {op.param: torch.empty(op.shape_at(at)) for op in EXPERTS if op.held_by(at)}
    found = filled(folder, params, EXPERTS, at)
    assert list(found) == ["experts.local_experts.2.fc2", "experts.local_experts.3.fc2"]
    assert found["experts.local_experts.2.fc2"] == [[22, 23], [26, 27]]
    with pytest.raises(AssertionError, match=r"the table says it is another expert rank's"):
        filled(folder, {"experts.local_experts.0.fc2": torch.empty(2, 2)}, EXPERTS, at)


def test_output_rows_beside_tied_embeddings_must_be_the_same_rows(tmp_path: Path) -> None:
    heads = {"lm_head": TENSORS["embed"].clone(), "other": TENSORS["embed"] + 1}
    with open_hf(write(tmp_path, TENSORS | heads)) as folder:
        check_tied(folder, {"lm_head": "embed"}, TABLE, ShardCoordinate())
        with pytest.raises(ValueError, match="other differs from embed though config.json says tie_word_embeddings=tr"):
            check_tied(folder, {"other": "embed"}, TABLE, ShardCoordinate())


def test_an_unknown_parameter_of_the_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no mapping for router"):
        filled(write(tmp_path, TENSORS), {"router": torch.empty(1)})


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
    index = {
        "metadata": {},
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"not there: model-00002-of-00002\.safetensors"), open_hf(tmp_path):
        pass


PARTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4), "c": torch.zeros(1)}
SIZES = {name: t.numel() * 4 for name, t in PARTS.items()}  # 24, 16, 4


def write_shards(folder: Path, shard_bytes: int) -> None:
    writer = HFWriter(folder, SIZES, shard_bytes)
    for name, tensor in PARTS.items():
        writer.add(name, tensor)
    writer.finish()


def test_files_are_filled_in_order_up_to_the_limit() -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert _assign_files(SIZES, 40) == {"a": first, "b": first, "c": second}
    assert list(_assign_files(SIZES, 10).values()) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert set(_assign_files(SIZES, 44).values()) == {"model.safetensors"}


@pytest.mark.parametrize("shard_bytes", [10, 40, 100])
def test_what_is_written_is_read_back_by_slices(tmp_path: Path, shard_bytes: int) -> None:
    write_shards(tmp_path, shard_bytes)
    with open_hf(tmp_path) as folder:
        assert folder.shapes == {"a": (2, 3), "b": (4,), "c": (1,)}
        assert folder.read("a", 0, 1, 1).tolist() == [[3, 4, 5]]
        assert folder.read("a", 1, 1, 2).tolist() == [[1, 2], [4, 5]]
        assert folder.read("b", 0, 0, 4).tolist() == [1, 1, 1, 1]


def test_the_index_names_the_file_of_every_tensor(tmp_path: Path) -> None:
    write_shards(tmp_path, 40)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 44}
    assert index["weight_map"]["c"] == "model-00002-of-00002.safetensors"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_tensors_out_of_order_or_lost_are_our_own_mistake(tmp_path: Path) -> None:
    writer = HFWriter(tmp_path, SIZES, 100)
    with pytest.raises(AssertionError, match="got b, expected"):
        writer.add("b", PARTS["b"])
    writer.add("a", PARTS["a"])
    with pytest.raises(AssertionError, match="never came"):
        writer.finish()


def test_clearing_leaves_no_loadable_model(tmp_path: Path) -> None:
    write_shards(tmp_path, 40)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    clear_weights(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_companions_are_copied_and_weights_and_config_are_not(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    write_shards(source, 40)
    companions = ["chat_template.jinja", "generation_config.json", "merges.txt", "tokenizer.json"]
    for name in ("config.json", "run.py", *companions):
        (source / name).write_text(name)
    copy_tokenizer(source, target)
    assert sorted(p.name for p in target.iterdir()) == companions


def test_an_exported_folder_claims_no_layers_that_were_passed_over_nor_that_it_has_no_weights(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    config = {"model_type": "qwen3", "num_nextn_predict_layers": 0}
    (source / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1, RANDOM_WEIGHTS: True}))
    finish_folder(target, source, "actor", torch.bfloat16)
    assert json.loads((target / "config.json").read_text()) == config | {
        "dtype": "bfloat16",
        "architectures": ["Qwen3ForCausalLM"],
    }
