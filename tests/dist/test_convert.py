"""Models on disk, there and back: the same bits whatever the form, the layout and the family."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from convert_cases import PoolGroup, save_adapters, save_checkpoint, save_torch_dist
from parity_compare import assert_same_bits
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_disk import small_disk
from spawn import Ranks
from tiny_models import write_model, write_packed
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl import cli
from megarl.arch.layout import Layout
from megarl.commands.convert import convert as convert_module
from megarl.commands.convert.convert import Ranks as ConvertRanks
from megarl.config import Config, to_yaml
from megarl.io.durable_files import SUMS
from megarl.io.rank_files import facts_under
from megarl.trainer.checkpoint.checkpoint import read_manifest, write_manifest

pytestmark = pytest.mark.dist


@pytest.fixture
def pool(two_ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> PoolGroup:
    group = PoolGroup(two_ranks)
    monkeypatch.setattr(convert_module, "Group", group)
    return group


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", tied=True)


@pytest.fixture
def megatron(pool: PoolGroup, model: Path, tmp_path: Path) -> Path:
    convert(model, tmp_path / "megatron", "tp=2")
    return tmp_path / "megatron"


def convert(source: Path, target: Path, *words: str) -> None:
    assert cli.main(["convert", f"from={source}", f"to={target}", *words]) == 0


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def num_shards(folder: Path, name: str) -> int:
    lists = [json.loads(file.read_text())["tensors"] for file in folder.glob("rank_*.json")]
    return sum(len(tensors[name]["boxes"]) for tensors in lists if name in tensors)


@pytest.mark.parametrize(
    ("family", "tied", "there", "back"),
    [
        ("qwen3", True, "tp=2", "pp=2 vpp=2"),
        pytest.param("mixtral", False, "pp=2 first_stage_layers=1", "tp=2 etp=1 ep=2", marks=pytest.mark.full),
        pytest.param("qwen2", False, "pp=2 vpp=2", "tp=2", marks=pytest.mark.full),
        pytest.param("deepseek_v3", False, "tp=2 ep=2 etp=1", "pp=2", marks=pytest.mark.full),
        pytest.param("glm4_moe", False, "ep=2", "tp=2", marks=pytest.mark.full),
        pytest.param("minimax_m2", False, "tp=2 ep=2 etp=1", "pp=2", marks=pytest.mark.full),
        pytest.param("gpt_oss", False, "tp=2 ep=2 etp=1", "pp=2", marks=pytest.mark.full),
    ],
)
def test_there_and_back_is_bit_exact(
    pool: PoolGroup, tmp_path: Path, family: str, tied: bool, there: str, back: str
) -> None:
    source = write_model(tmp_path / "model", family, tied=tied)
    convert(source, tmp_path / "megatron", *there.split())
    before = weights(source)
    shutil.rmtree(source)  # the checkpoint needs nothing but itself
    convert(tmp_path / "megatron", tmp_path / "hf", *back.split())
    assert_same_bits(weights(tmp_path / "hf"), before)
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (tmp_path / "hf" / "manifest.json").exists()


def test_experts_in_mxfp4_become_bfloat16(pool: PoolGroup, tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain", "gpt_oss", tied=False, intermediate_size=32)
    (tmp_path / "packed").mkdir()
    packed = write_packed(tmp_path / "packed", plain)
    convert(packed, tmp_path / "hf", "format=hf", "dtype=bfloat16", "ep=2", "--verify")
    got, held = weights(tmp_path / "hf"), weights(packed)
    assert sorted(got) == sorted(weights(plain))
    assert {tensor.dtype for tensor in got.values()} == {torch.bfloat16}
    name = "model.layers.1.mlp.experts.down_proj"
    theirs = convert_moe_packed_tensors(held[f"{name}_blocks"], held[f"{name}_scales"])
    assert torch.equal(got[name], theirs)
    assert torch.equal(got["model.norm.weight"], held["model.norm.weight"].bfloat16())
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"


def test_as_many_ranks_as_the_layout_takes() -> None:
    """The last but one: a stage's 4 expert ranks are 2 replicas of tp=2."""
    layouts = Layout(tp=2), Layout(tp=2, pp=3), Layout(tp=2, pp=3, ep=4, etp=1), Layout(tp=2, ep=2)
    assert [convert_module.ranks_of(layout) for layout in layouts] == [2, 6, 12, 4]


def test_a_megatron_folder_says_what_it_is(megatron: Path, model: Path) -> None:
    manifest = read_manifest(megatron)
    files = sorted(str(path.relative_to(megatron)) for path in megatron.rglob("*") if path.is_file())
    assert sorted([*manifest.pop("files"), "manifest.json"]) == files
    assert manifest == {
        "format": "megatron",
        "megarl": cli.__version__,
        "role": "actor",
        "dtype": "float32",
        "layout": {"tp": 2, "pp": 1, "vpp": 1, "ep": 1, "etp": 2},
        "num_tensors": len(weights(model)),
        "num_bytes": sum(t.nbytes for t in weights(model).values()),
        "source": str(model),
        "verified": False,
    }


@pytest.mark.full
def test_one_flipped_bit_is_named_and_nothing_is_written(
    megatron: Path, pool: PoolGroup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a tensor, which a rank reads, of a list, and of a Hugging Face folder that was written here."""
    convert(megatron, tmp_path / "exported")
    names = ["rank_00001.0000.safetensors", "rank_00000.json", "hf/config.json", "manifest.json"]
    files = [*(megatron / name for name in names), tmp_path / "exported" / "model.safetensors"]
    capsys.readouterr()
    for file in files:
        source = tmp_path / "exported" if file.suffix == ".safetensors" and file.parent != megatron else megatron
        flip(file, file.stat().st_size - 3)
        assert cli.main(["convert", f"from={source}", f"to={tmp_path}/new", "format=hf"]) == 2
        assert capsys.readouterr().err.startswith(f"error: {file} is damaged")
        flip(file, file.stat().st_size - 3)
    assert not list(tmp_path.glob("new*"))
    convert(megatron, tmp_path / "new")


def test_from_layout_to_layout_the_shards_are_cut_anew(megatron: Path, model: Path, tmp_path: Path) -> None:
    name = "decoder.layers.self_attention.linear_proj.weight[0]"
    assert num_shards(megatron, name) == 2, "a row-parallel weight, on each of two ranks"
    convert(megatron, tmp_path / "pp", "format=megatron", "pp=2")
    assert num_shards(tmp_path / "pp", name) == 1
    convert(tmp_path / "pp", tmp_path / "hf", "--verify")
    assert_same_bits(weights(tmp_path / "hf"), weights(model))


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "saved", "read"),
    [
        ("qwen3_moe", Layout(tp=2, ep=2, etp=1), "tp=2"),
        pytest.param("qwen3", Layout(pp=2), "tp=2", marks=pytest.mark.full),
    ],
)
def test_weights_come_from_megatrons_own_checkpoints_and_verls(
    pool: PoolGroup, two_ranks: Ranks, tmp_path: Path, family: str, saved: Layout, read: str
) -> None:
    """Written by megatron.core.dist_checkpointing, in verl's folders global_step_N/actor/{dist_ckpt,huggingface}."""
    source = write_model(tmp_path / "model", family, tied=False)
    actor = tmp_path / "global_step_7" / "actor"
    two_ranks.run(save_torch_dist, str(source), str(actor / "dist_ckpt"), saved, True, timeout_s=180)
    (actor / "huggingface").mkdir()
    for name in ("config.json", "chat_template.jinja"):
        shutil.copy(source / name, actor / "huggingface")
    convert(actor, tmp_path / "hf", *read.split(), "--verify")
    assert_same_bits(weights(tmp_path / "hf"), weights(source))
    convert(actor / "dist_ckpt", tmp_path / "shards", f"model={source}", "format=megatron", "tp=2")
    convert(tmp_path / "shards", tmp_path / "hf2")
    assert_same_bits(weights(tmp_path / "hf2"), weights(source))


@pytest.mark.full
def test_such_a_checkpoint_without_weights_or_whole_files(
    pool: PoolGroup, two_ranks: Ranks, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a bridge verl writes the weights as a Hugging Face folder, and dist_ckpt has only the optimizer."""
    step = tmp_path / "global_step_7"
    actor = step / "actor"
    two_ranks.run(save_torch_dist, str(model), str(actor / "dist_ckpt"), Layout(tp=2), False, timeout_s=180)
    shutil.copytree(model, actor / "huggingface")
    convert(actor, tmp_path / "hf", "format=hf")
    assert_same_bits(weights(tmp_path / "hf"), weights(model))
    shutil.rmtree(actor / "dist_ckpt")
    two_ranks.run(save_torch_dist, str(model), str(actor / "dist_ckpt"), Layout(tp=2), True, timeout_s=180)
    capsys.readouterr()
    for folder, words in (
        (step, f"error: {step}: verl's checkpoint with actor; expected {actor}\n"),
        (actor / "dist_ckpt", "Megatron's checkpoint says no architecture; expected model=FOLDER with config.json\n"),
    ):
        assert cli.main(["convert", f"from={folder}", f"to={tmp_path}/new"]) == 2
        assert capsys.readouterr().err.endswith(words)
    for file in (actor / "dist_ckpt").glob("*.distcp"):
        file.write_bytes(b"")
    assert cli.main(["convert", f"from={actor}", f"to={tmp_path}/new"]) == 2
    assert re.match(rf"error: {actor}/dist_ckpt/\S+\.distcp: it cannot be read \(", capsys.readouterr().err)


@pytest.mark.full
@pytest.mark.parametrize("role", ["critic", pytest.param("actor", marks=pytest.mark.full)])
def test_a_runs_checkpoint_becomes_the_model_it_trained(
    pool: PoolGroup, two_ranks: Ranks, model: Path, tmp_path: Path, role: str
) -> None:
    step = tmp_path / "run" / "checkpoints" / "step_00000001"
    step.mkdir(parents=True)
    trained = two_ranks.run(save_checkpoint, str(model), str(step / role), Layout(tp=2), role, timeout_s=180)[0]
    write_manifest(step, {"files": facts_under(step, role)})
    config = Config()
    config.model.path = config.critic.model.path = str(model)
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config))
    convert(step / role, tmp_path / "hf", "pp=2", "--verify")
    assert_same_bits(weights(tmp_path / "hf"), trained)
    head = "score.weight" if role == "critic" else "model.norm.weight"
    assert not torch.equal(trained[head], weights(model).get(head, torch.zeros(1, 32))), "it has learnt"
    convert(tmp_path / "hf", tmp_path / "megatron", "--verify")
    assert json.loads((tmp_path / "megatron" / "manifest.json").read_text())["role"] == role
    (tmp_path / "run" / "config.yaml").unlink()
    convert(step / role, tmp_path / "again", f"model={model}")
    assert_same_bits(weights(tmp_path / "again"), trained)


def test_adapters_become_a_whole_model(
    pool: PoolGroup, two_ranks: Ranks, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    actor = tmp_path / "run" / "checkpoints" / "step_00000001" / "actor"
    actor.parent.mkdir(parents=True)
    merged = two_ranks.run(save_adapters, str(model), str(actor), Layout(tp=2), timeout_s=180)[0]
    write_manifest(actor.parent, {"files": facts_under(actor.parent, "actor")})
    convert(actor, tmp_path / "hf", f"model={model}", "tp=2", "--verify")
    assert f"from {actor} (megatron, actor, float32, adapters)\n" in capsys.readouterr().out
    assert_same_bits(weights(tmp_path / "hf"), merged)
    assert not torch.equal(
        merged["model.layers.0.mlp.up_proj.weight"], weights(model)["model.layers.0.mlp.up_proj.weight"]
    )
    convert(actor, tmp_path / "megatron", f"model={model}", "tp=2", "format=megatron", "--verify")
    convert(tmp_path / "megatron", tmp_path / "again", "pp=2")
    assert_same_bits(weights(tmp_path / "again"), merged)
    assert cli.main(["convert", f"from={actor}", f"to={tmp_path}/x", f"model={model}", "dtype=bfloat16"]) == 2
    assert "dtype=bfloat16: the adapters in " in capsys.readouterr().err


@pytest.mark.full
def test_another_type_rounds_once_and_is_told(
    pool: PoolGroup, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(model, tmp_path / "megatron", "dtype=bfloat16", "tp=2", "--verify")
    before = weights(model)
    assert f"{len(before)} tensors change their type: model.embed_tokens.weight" in capsys.readouterr().out
    rounded = {name: tensor.bfloat16() for name, tensor in before.items()}
    convert(tmp_path / "megatron", tmp_path / "hf", "--verify")
    assert_same_bits(weights(tmp_path / "hf"), rounded)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    convert(tmp_path / "megatron", tmp_path / "wide", "dtype=float32", "--verify")
    assert_same_bits(weights(tmp_path / "wide"), {name: tensor.float() for name, tensor in rounded.items()})


def test_each_stage_says_what_it_did(pool: PoolGroup, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    convert(model, tmp_path / "megatron", "tp=2", "--verify")
    said = capsys.readouterr().out.splitlines()
    tensors = weights(model)
    size = f"{sum(t.nbytes for t in tensors.values()) / 1000:.1f} kB"
    assert said[:3] == [
        f"from {model} (hf, actor, float32)",
        f"to   {tmp_path}/megatron (megatron, actor, float32)",
        "over 2 ranks: tp=2 pp=1 vpp=1 ep=1 etp=2",
    ]
    stages = [line.rpartition(",")[0] for line in said[3:-1]]
    names = ["read", "write", "verify from", "verify to: reading", "verify to"]
    assert stages == [f"{name}: {len(tensors)} tensors, {size}" for name in names]
    assert said[-1] == f"done: {tmp_path}/megatron"


def test_a_flipped_bit_in_a_weight_file_is_named_and_so_are_shards_that_were_cut(
    megatron: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = tmp_path / "hf"
    convert(megatron, hf)
    capsys.readouterr()
    assert cli.main(["convert", f"from={megatron}", f"to={hf}", "--verify-only", "tp=2"]) == 0
    assert capsys.readouterr().out.endswith("\nequal\n")
    with safe_open(hf / "model.safetensors", "pt") as file:
        last = sorted(file.keys())[-1]
    (hf / SUMS).unlink()  # as of a folder that was not written here
    flip(hf / "model.safetensors", -1)
    assert cli.main(["convert", f"from={megatron}", f"to={hf}", "--verify-only", "tp=2"]) == 1
    assert capsys.readouterr().err == (
        f"not equal: {hf} does not hold what {megatron} does: 1 tensors differ: {last}\n"
    )
    for file in megatron.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    assert cli.main(["convert", f"from={model}", f"to={megatron}", "--verify-only"]) == 2
    said = capsys.readouterr().err
    assert re.match(rf"error: {megatron}/rank_00000\.0000\.safetensors has 100 bytes, and \d+ were written; ", said)


def test_a_conversion_that_fails_its_check_leaves_nothing(
    pool: PoolGroup, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = ConvertRanks.digests

    def wrong(ranks: ConvertRanks, folder: Any, title: str) -> dict[str, str]:
        found = digests(ranks, folder, title)
        return found if folder.format == "hf" else {n: d for n, d in found.items() if n != "model.norm.weight"}

    monkeypatch.setattr(ConvertRanks, "digests", wrong)
    assert cli.main(["convert", f"from={model}", f"to={tmp_path}/new", "--verify"]) == 1
    assert "1 tensors are missing: model.norm.weight" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_layout_that_cannot_be_is_refused(model: Path) -> None:
    """The others are in tests/arch/test_layout.py."""
    with pytest.raises(
        ValueError, match="pipeline_model_parallel_size=3 does not divide the model's num_hidden_layers"
    ):
        convert_module.check_fits(model, "actor", Layout(pp=3))


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("config", "'rwkv'"),
        ("names", "missing: model.norm.weight; not of this model: model.norm.bias"),
        ("first row", f"model.safetensors: the tensor {Q_PROJ} holds inf; expected finite numbers"),
        ("last row", f"model.safetensors: the tensor {Q_PROJ} holds inf; expected finite numbers"),
        ("disk", "kB, the disk has 1.0 kB free"),
        ("target", "there is something already, and nothing is overwritten; expected a new folder"),
    ],
)
def test_what_cannot_be_converted_is_one_sentence_and_leaves_nothing(
    pool: PoolGroup,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoil: str,
    words: str,
) -> None:
    """A row that is not finite is the first rank's, or the last one's."""
    other, target = shutil.copytree(model, tmp_path / "other"), tmp_path / "new"
    tensors = weights(other)
    if spoil == "config":
        config = json.loads((other / "config.json").read_text()) | {"model_type": "rwkv"}
        (other / "config.json").write_text(json.dumps(config))
    elif spoil == "names":
        tensors["model.norm.bias"] = tensors.pop("model.norm.weight")
    elif spoil == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    elif spoil == "target":
        target = shutil.copytree(model, tmp_path / "there")
    else:
        tensors[Q_PROJ][0 if spoil == "first row" else -1, 0] = torch.inf
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert cli.main(["convert", f"from={other}", f"to={target}", "tp=2"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and words in said and said.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.full
def test_full_disk_ends_a_conversion_in_a_sentence_with_the_folder(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is room for the tensors, as was asked before, and not for what is beside them."""
    pages = -(-sum(tensor.nbytes for tensor in weights(model).values()) // 4096)
    with small_disk(tmp_path / "disk", f"{4 * pages}k") as disk:
        assert cli.main(["convert", f"from={model}", f"to={disk}/new", "tp=2"]) == 1
        assert not any(disk.iterdir())
    said = capsys.readouterr().err
    assert re.fullmatch(f"error: {disk}/new.partial: .*No space left on device.* bytes free.\n", said), said


@pytest.mark.full
def test_with_processes_of_its_own(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "megatron", "tp=2", "--verify")
    assert json.loads((tmp_path / "megatron" / "manifest.json").read_text())["verified"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]
