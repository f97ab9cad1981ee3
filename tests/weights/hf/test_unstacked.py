"""Stacked experts: folders in bfloat16 and in MXFP4 read expert by expert, and stacks joined of single experts."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import read_config, write_model, write_packed
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl.weights.hf.named import check_names, open_for
from megarl.weights.hf.unstacked import dequantized
from megarl.weights.mapping.families import ignorable, stacks_for, table_for
from megarl.weights.mapping.stacks import Stack, joined

EXPERTS = "model.layers.0.mlp.experts"


def test_every_code_and_exponent_as_transformers_reads_them() -> None:
    g = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 10, 2, 16), generator=g, dtype=torch.uint8)
    scales = torch.randint(20, 230, (3, 10, 2), generator=g, dtype=torch.uint8)
    assert torch.equal(dequantized(blocks, scales).transpose(1, 2), convert_moe_packed_tensors(blocks, scales))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("plain"), "gpt_oss", tied=False, intermediate_size=32)


@pytest.fixture(scope="module")
def packed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packed(tmp_path_factory.mktemp("packed"), plain)


def test_parts_of_a_stack_are_read_as_single_tensors(plain: Path) -> None:
    config = read_config(plain)
    stack = load_file(plain / "model.safetensors")[f"{EXPERTS}.gate_up_proj"]
    with open_for(plain, config) as folder:
        check_names(folder, table_for(config), ignorable(config, "actor"))
        up = folder.read(f"{EXPERTS}.3.up_proj.weight", 0, 5, 7)
        assert torch.equal(up, stack[3].T[1::2][5:12])
        columns = folder.read(f"{EXPERTS}.3.down_proj.weight", 1, 2, 4)
        assert torch.equal(columns, folder.read_hub(f"{EXPERTS}.down_proj")[3].T[:, 2:6])
        assert folder.hub_shapes == {n: tuple(t.shape) for n, t in load_file(plain / "model.safetensors").items()}


def test_mxfp4_is_read_as_transformers_dequantizes_it(packed: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(
        packed, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    ).state_dict()
    config = read_config(packed)
    with open_for(packed, config) as folder:
        check_names(folder, table_for(config), ignorable(config, "actor"))
        for name in (f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"):
            assert folder.dtype(name) is torch.bfloat16
            assert theirs[name].abs().max() > 0.1
            assert torch.equal(folder.read_hub(name), theirs[name])
        gate = folder.read(f"{EXPERTS}.5.gate_proj.weight", 0, 0, 32)
        assert torch.equal(gate, theirs[f"{EXPERTS}.gate_up_proj"][5].T[::2])


def test_an_exponent_of_mxfp4_that_means_no_number_is_named(packed: Path, tmp_path: Path) -> None:
    name, other = f"{EXPERTS}.down_proj", shutil.copytree(packed, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors[f"{name}_scales"][5, 0, 0] = 255
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with open_for(other, read_config(other)) as folder:
        folder.read(f"{EXPERTS}.4.down_proj.weight", 0, 0, 32)
        with pytest.raises(ValueError, match=rf"{other}/model.safetensors: the tensor {name}_blocks holds (nan|-?inf)"):
            folder.read(f"{EXPERTS}.5.down_proj.weight", 0, 0, 32)


def test_a_stack_of_another_shape_is_named(plain: Path) -> None:
    sentence = (
        r"of another shape: model.layers.0.mlp.experts.gate_up_proj \(has \[8, 32, 64\], expected \[4, 32, 64\]\)"
    )
    with pytest.raises(ValueError, match=sentence), open_for(plain, read_config(plain) | {"num_local_experts": 4}):
        pass


# joined from single experts
def test_rows_of_gate_and_up_alternate_in_the_columns_of_a_stack() -> None:
    stack = Stack("s", 2, ("{}.gate", "{}.up"), (2, 3))
    gate, up = torch.arange(6.0).view(2, 3), torch.arange(10.0, 16.0).view(2, 3)
    stream = [("before", torch.zeros(1)), ("0.gate", -gate), ("0.up", -up), ("1.gate", gate), ("1.up", up)]
    found = dict(joined(stream, [stack]))
    assert list(found) == ["before", "s"]
    assert found["s"].shape == stack.shape == (2, 3, 4)
    assert found["s"][1].tolist() == [[0, 10, 3, 13], [1, 11, 4, 14], [2, 12, 5, 15]]
    assert torch.equal(stack.part_of(found["s"][0], 1), -up)


def test_biases_alternate_too() -> None:
    stack = Stack("s", 1, ("{}.gate", "{}.up"), (3,))
    found = dict(joined([("0.gate", torch.tensor([1, 2, 3])), ("0.up", torch.tensor([4, 5, 6]))], [stack]))
    assert found["s"].tolist() == [[1, 4, 2, 5, 3, 6]]


def test_a_stream_that_lacks_a_part_is_an_error() -> None:
    with pytest.raises(AssertionError, match="parts of s never came"):
        list(joined([("0.gate", torch.zeros(3))], [Stack("s", 1, ("{}.gate", "{}.up"), (3,))]))


def test_other_families_have_no_stacks() -> None:
    assert stacks_for({"model_type": "qwen3_moe"}) == stacks_for({}) == []
