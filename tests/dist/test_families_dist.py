"""HF -> Megatron -> HF on ranks, bit for bit, and log-probs against those of transformers, for every family."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_compare import assert_same_bits
from rank_answers import Answers
from safetensors.torch import load_file
from spawn import Ranks, run_ranks
from tiny_models import FAMILIES, LACKING, write_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from vision_folders import KINDS, write_vision_folder

from megarl.arch.hf_config import read_config, read_hf_config
from megarl.arch.layout import Layout
from megarl.mcore.models.model import build_model
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.mcore.training.step import Outputs, forward_only
from megarl.samples.batch import Batch, MicroBatch
from megarl.weights.hf.export import hf_sizes, hf_tensors, save_hf
from megarl.weights.hf.gather import local_parameters
from megarl.weights.hf.load import load_hf
from megarl.weights.hf.named import open_for

pytestmark = pytest.mark.dist

LENGTHS = [9, 1, 6, 12]


def tokens() -> torch.Tensor:
    return torch.randint(0, 45, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))


def run_cases(root: str, cases: dict[tuple[str, str], Layout]) -> dict[tuple[str, str], Any]:
    """(model, name of a layout) -> what this rank saw."""
    return {(model, name): _one_case(Path(root), model, name, layout) for (model, name), layout in cases.items()}


def _one_case(root: Path, model_name: str, layout_name: str, layout: Layout) -> dict[str, Any]:
    where = make_groups(layout)
    try:
        source = root / model_name
        config = read_hf_config(source)
        model = build_model(config, layout)
        load_hf(model, source, config)
        found = {name: tensor.clone() for name, tensor in hf_tensors(model, config, buffer_bytes=5_000)}
        assert {n: (tuple(t.shape), t.dtype) for n, t in found.items()} == hf_sizes(model, config)
        save_hf(model, config, root / f"{model_name} {layout_name}", source_folder=source, shard_bytes=30_000)
        micro = MicroBatch(Batch(tokens(), torch.tensor(LENGTHS)))
        columns = forward_only(model, [micro], Outputs(layout, config["vocab_size"]), torch.device("cpu"))
        return {"tensors": found, "log_probs": columns[0]["log_probs"] if where.is_reporter else None}
    finally:
        destroy_groups()


def critic_case(source: str, folder: str, layout: Layout) -> dict[str, Any]:
    """A critic from an actor's folder; then with another head, saved and loaded again."""
    make_groups(layout)
    config = json.loads((Path(source) / "config.json").read_text())
    model = build_model(config, layout, role="critic")
    load_hf(model, source, config, role="critic")
    first = dict(hf_tensors(model, config, role="critic"))["score.weight"].clone()
    for name, param in local_parameters(model).items():
        if name == "output_layer.weight":
            param.copy_(torch.arange(32.0)[None])
    save_hf(model, config, folder, source_folder=source, role="critic")
    torch.distributed.barrier()
    again = build_model(config, layout, role="critic")
    load_hf(again, folder, config, role="critic")
    found = {"head": first, "tensors": {n: t.clone() for n, t in hf_tensors(again, config, role="critic")}}
    destroy_groups()
    return found


def bf16_case(source: str, layout: Layout) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What a bf16 model (wrapped in Float16Module) exports in its own types, and what it pushes to bf16 servers."""
    make_groups(layout)
    config = read_hf_config(source)
    model = build_model(config, layout, dtype="bfloat16")
    load_hf(model, source, config)
    own = {n: t.clone() for n, t in hf_tensors(model, config)}
    assert {n: (tuple(t.shape), t.dtype) for n, t in own.items()} == hf_sizes(model, config)
    assert {t.dtype for _, t in hf_tensors(model, config, dtype=torch.float32)} == {torch.float32}
    pushed = {n: t.clone() for n, t in hf_tensors(model, config, dtype=torch.bfloat16)}
    assert {n: (tuple(t.shape), t.dtype) for n, t in pushed.items()} == hf_sizes(model, config, dtype=torch.bfloat16)
    destroy_groups()
    return own, pushed


ON_TWO = {
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "dp2": Layout(),
    "pp2 vpp2": Layout(pp=2, vpp=2),
    "pp2 uneven": Layout(pp=2, last_stage_layers=1),
}
# Biases of qwen2 are cut over tensor ranks; a tied embedding has a copy on the last stage.
OF_DENSE = {
    "qwen2 tied": ("tp2", "pp2 vpp2"),
    "qwen2 untied": ("pp2",),
    "qwen3 tied": ("pp2", "dp2"),
    "qwen3 untied": ("tp2", "pp2 vpp2", "pp2 uneven"),
}
DENSE = {
    "tp2pp2": Layout(tp=2, pp=2),
    "tp4": Layout(tp=4),  # two ranks share each of two heads of keys and values
    "tp2cp2+sp": Layout(tp=2, cp=2, sequence_parallel=True),
    "pp2dp2 vpp2": Layout(pp=2, vpp=2),
}
SPARSE = {
    "tp2pp2 etp2": Layout(tp=2, pp=2),
    "tp2pp2 ep2 etp1": Layout(tp=2, pp=2, ep=2, etp=1),
    "pp2dp2 ep2": Layout(pp=2, ep=2),
    "dp4 ep4": Layout(ep=4),
    "tp4 ep4 etp1": Layout(tp=4, ep=4, etp=1),
    "dp4 ep2 etp2": Layout(ep=2, etp=2),
    "tp2dp2 ep4 etp1": Layout(tp=2, ep=4, etp=1),
    "tp2cp2+sp ep2": Layout(tp=2, cp=2, ep=2, sequence_parallel=True),
    "tp2cp2+sp ep2 etp1": Layout(tp=2, cp=2, ep=2, etp=1, sequence_parallel=True),
    "pp2dp2 vpp2 ep2": Layout(pp=2, vpp=2, ep=2),
    "pp2dp2 uneven ep2": Layout(pp=2, ep=2, first_stage_layers=3),
}
SOME_SPARSE = ("tp2pp2 ep2 etp1", "dp4 ep2 etp2", "tp2cp2+sp ep2", "pp2dp2 vpp2 ep2")
WITH_VISION = () if LACKING else tuple(KINDS)
NEW = [*(family for family in FAMILIES if family not in ("qwen2", "qwen3")), *WITH_VISION]
OF_FAMILY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(NEW, tuple(DENSE)),
    **dict.fromkeys(("mixtral", "deepseek_v3", "glm4_moe", "minimax_m2"), SOME_SPARSE),
    "qwen3_moe": tuple(name for name in SPARSE if name != "tp2cp2+sp ep2 etp1"),
    **dict.fromkeys(("qwen3_moe_plain", "deepseek_v3_plain"), ("pp2dp2 ep2",)),
    "kimi_k2": ("tp2pp2 ep2 etp1", "tp2cp2+sp ep2"),
    "glm4_moe_air": ("dp4 ep2 etp2",),
    "qwen3_next": (*SOME_SPARSE, "tp4 ep4 etp1"),
    "qwen3_5_moe_text": ("tp2pp2 ep2 etp1", "tp2cp2+sp ep2"),
    "qwen3_5": ("tp2pp2",),
    "qwen3_5_moe": ("tp2cp2+sp ep2",),
    "gpt_oss": ("tp2pp2 ep2 etp1", "tp4 ep4 etp1", "dp4 ep4", "pp2dp2 vpp2 ep2", "tp2cp2+sp ep2 etp1"),
    "deepseek_v32": ("tp2cp2+sp ep2", "dp4 ep2 etp2", "pp2dp2 vpp2 ep2"),
    "glm_moe_dsa": ("tp2cp2+sp ep2 etp1", "pp2dp2 uneven ep2"),  # its third layer cannot begin a stage
    "nemotron_h": SOME_SPARSE,
    "nemotron_h_dense": tuple(name for name in DENSE if name != "tp4"),  # it has two groups of B and C
    "nemotron_h_latent": ("tp2pp2 ep2 etp1", "tp2cp2+sp ep2"),
}
ON: dict[int, dict[tuple[str, str], Layout]] = {
    1: {(family, "one"): Layout() for family in NEW},
    2: {(model, name): ON_TWO[name] for model, names in OF_DENSE.items() for name in names},
    4: {(family, name): (DENSE | SPARSE)[name] for family in NEW for name in OF_FAMILY[family]},
}
CASES = [*ON[2], *(pytest.param(*case, marks=pytest.mark.full) for size in (1, 4) for case in ON[size])]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for model in OF_DENSE:
        family, kind = model.split()
        write_model(root / model, family, tied=kind == "tied", max_shard_size="30KB")
    return root


def run(root: Path, cases: dict[tuple[str, str], Layout], size: int) -> list[Any]:
    for family in {model for model, _ in cases} - {file.name for file in root.iterdir()}:
        if family in WITH_VISION:
            write_vision_folder(root / family, family)
        else:
            write_model(root / family, family, tied=family == "llama3")
    return run_ranks(size, run_cases, str(root), cases, timeout_s=480)


@pytest.fixture(scope="module")
def found(root: Path, request: pytest.FixtureRequest) -> Answers:
    """(model, layout) -> what each rank saw, of the models that this session's tests are about."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    models = {own["model"] for own in params if "model" in own}
    worlds = {size: {case: how for case, how in cases.items() if case[0] in models} for size, cases in ON.items()}
    return Answers(*((cases, partial(run, root, cases, size)) for size, cases in worlds.items()))


def hf_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_every_rank_streams_what_the_folder_held_and_saves_it(
    found: Answers, root: Path, model: str, layout: str
) -> None:
    ranks, source, saved = found[model, layout], root / model, root / f"{model} {layout}"
    expected = hf_weights(source)
    trained = expected if model not in WITH_VISION else of_text(source)
    for rank in ranks:
        assert_same_bits(rank["tensors"], trained)
    assert_same_bits(hf_weights(saved), expected)
    assert len(list(saved.glob("model-*-of-*.safetensors"))) > 1
    assert json.loads((saved / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert (saved / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not list(saved.glob("*.partial"))


def of_text(folder: Path) -> dict[str, torch.Tensor]:
    """What is trained of a folder with a vision part, under the names of a folder of text alone."""
    with open_for(folder, read_hf_config(folder)) as held:
        names = (name for name in held.hub_shapes if not name.startswith(("mtp.", "model.visual.")))
        return {name: held.read_hub(name) for name in names}


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


@pytest.mark.parametrize("model", [*OF_DENSE, *(pytest.param(family, marks=pytest.mark.full) for family in NEW)])
def test_log_probs_equal_those_of_transformers(found: Answers, root: Path, model: str) -> None:
    """Float32 on both sides: measured differences are below 3e-6, of log-probs around -4."""
    cases = [case for cases in ON.values() for case in cases if case[0] == model]
    seen = [rank["log_probs"] for case in cases for rank in found[case] if rank["log_probs"] is not None]
    assert len(seen) >= len(cases)
    expected = reference(root / " ".join(cases[-1]))
    assert expected.std() > 0.5
    for log_probs in seen:
        torch.testing.assert_close(log_probs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", ["tp2", "pp2 vpp2"])
def test_a_critic_takes_an_actors_trunk_and_its_own_head(
    two_ranks: Ranks, root: Path, tmp_path: Path, layout: str
) -> None:
    trunk = {n: t for n, t in hf_weights(root / "qwen3 tied").items() if n != "lm_head.weight"}
    for rank in two_ranks.run(critic_case, str(root / "qwen3 tied"), str(tmp_path / "critic"), ON_TWO[layout]):
        assert torch.equal(rank["head"], torch.zeros(1, 32))  # the folder has none: as the model code made it
        assert_same_bits(rank["tensors"], trunk | {"score.weight": torch.arange(32.0)[None]})
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(model.score.weight, torch.arange(32.0)[None])


# Names of weights that stay float32 in a bf16 trainer, as published folders have them, and of those also on servers.
_DECAYS = (".A_log", ".D", ".dt_bias")
BF16 = {
    "qwen2 tied": ((), ()),
    "qwen3_next": ((".A_log",), (".A_log",)),
    "qwen3_5_text": ((".A_log", ".linear_attn.norm.weight"), (".A_log",)),
    "nemotron_h": ((*_DECAYS, ".e_score_correction_bias"), (*_DECAYS, ".e_score_correction_bias")),
    "nemotron_h_dense": (_DECAYS, _DECAYS),
}
ON_TWO_SP = Layout(tp=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("qwen2 tied", ON_TWO["tp2"]),
        *(
            pytest.param(*case, marks=marks)
            for case, *marks in (
                (("qwen3_5_text", ON_TWO["tp2"]), pytest.mark.megatron_0_19),
                (("nemotron_h_dense", ON_TWO["pp2"]), pytest.mark.megatron_0_19),
                (("qwen3_next", ON_TWO_SP), pytest.mark.megatron_0_19, pytest.mark.full),
                (("nemotron_h", ON_TWO_SP), pytest.mark.megatron_0_19, pytest.mark.full),
            )
        ),
    ],
)
def test_bf16_models_are_exported_as_rounded_once(
    two_ranks: Ranks, root: Path, tmp_path: Path, model: str, layout: Layout
) -> None:
    """And what published folders hold in float32 among others is not rounded at all."""
    folder = root / model if (root / model).exists() else write_model(tmp_path / "model", model, tied=False)
    held, (kept, served) = hf_weights(folder), BF16[model]
    assert all(any(name.endswith(end) for name in held) for end in kept)
    for own, pushed in two_ranks.run(bf16_case, str(folder), layout):
        for found, ends in ((own, kept), (pushed, served)):
            assert_same_bits(found, {n: t if n.endswith(ends) else t.to(torch.bfloat16) for n, t in held.items()})
