"""Parameters by arithmetic, against what the models' authors say, transformers, and numbers made by hand."""

import re
from math import prod
from pathlib import Path

import pytest
import torch
from preset_files import MINIS, NAMES, PUBLISHED, content_of, hf_of
from transformers import AutoModelForCausalLM

import megarl
from megarl.arch.hf_config import config_of
from megarl.arch.layers import layers_of
from megarl.arch.layout import Layout
from megarl.mcore.models.families import FAMILIES as BUILT
from megarl.weights.count import Parameters, check, kinds_of, layers_of_stage, of_stage, whole
from megarl.weights.mapping.families import FAMILIES, layer_of

# The page has the totals of the models' cards and files, without what is no parameter or is not trained: biases of
# experts, and the layer of a second token, which has an embedding and a head of its own.
PAGE = Path(megarl.__file__).parents[1] / "docs" / "parallelism.md"
TOTALS = {
    name: int(total.replace(",", "")) for name, total in re.findall(r"\| `(\w+)` \| ([\d,]+) \|", PAGE.read_text())
}

# A model of two layers whose numbers can be followed by hand.
HF = {
    "model_type": "qwen3_moe",
    "vocab_size": 40,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "mlp_only_layers": [0],
    "tie_word_embeddings": False,
}
# q 8 -> 16, k and v 8 -> 8, o 16 -> 8, their two norms of 4, the layer's two norms of 8
ATTENTION = 8 * 16 + 2 * 8 * 8 + 16 * 8
NORMS = 2 * 4 + 2 * 8


def test_what_is_counted_is_what_can_be_built():
    assert sorted(FAMILIES) == sorted(BUILT)
    for name in NAMES:
        check(hf_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_has_the_layers_that_its_family_s_class_makes_of_it(name):
    """Its numbers are planned as they are written, without transformers."""
    assert layers_of(content_of(name)["model"]["config"]) == layers_of(hf_of(name))


@pytest.mark.parametrize("name", MINIS)
def test_layers_of_one_kind_have_the_same_parameters(name):
    hf = hf_of(name)
    for at, kind in enumerate(kinds_of(hf)):
        assert sum(prod(op.shard_shape(1)) for op in layer_of(hf, at)) == kind.parameters().total


def test_a_number_that_is_missing_is_named():
    with pytest.raises(ValueError, match="^config.json: there is no moe_intermediate_size; expected the config of a q"):
        check(HF | {"moe_intermediate_size": None})


def test_every_published_preset_has_a_known_total():
    assert sorted(TOTALS) == PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_parameters_that_its_authors_count(name):
    assert whole(hf_of(name)) == TOTALS[name]


@pytest.mark.parametrize("name", ["qwen2_5_0_5b", "llama3_2_1b", "mistral_7b_v0_1", "qwen3_30b_a3b", *MINIS])
def test_transformers_makes_a_model_of_so_many_parameters(name):
    assert whole(hf_of(name)) == parameters_of_transformers(name)


def parameters_of_transformers(name: str) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(hf_of(name)))
    return sum(parameter.numel() for name, parameter in model.named_parameters() if "mtp" not in name)


def test_layers_of_which_nothing_is_known_are_named():
    with pytest.raises(ValueError, match="^config.json: the planner does not know layers of the kind chunked"):
        check(HF | {"layer_types": ["full_attention", "chunked_attention"]})


def test_the_parts_of_a_model():
    dense = ATTENTION + NORMS + 3 * 8 * 12
    sparse = ATTENTION + NORMS + 8 * 4  # the router
    ends = 40 * 8 + 8 + 40 * 8  # embedding, norm, head
    assert of_stage(HF, Layout(), 0) == Parameters(dense + sparse + ends, 4 * 3 * 8 * 6)
    assert of_stage(HF, Layout(), 0, "critic") == Parameters(dense + sparse + 40 * 8 + 8 + 8, 4 * 3 * 8 * 6)


def test_norms_and_routers_are_whole_on_every_rank():
    layout = Layout(tp=2, ep=2, etp=2, sequence_parallel=True)
    dense = 2 * (ATTENTION // 2 + NORMS) + 3 * 8 * 12 // 2 + 8 * 4
    ends = 24 * 8 + 8 + 24 * 8  # 40 rows are padded to 48, which two ranks share
    assert of_stage(HF, layout, 0) == Parameters(dense + ends, 2 * 3 * 8 * 6 // 2)


def test_a_whole_model_is_counted_without_padding():
    hf = HF | {"vocab_size": 41}
    assert whole(hf) == whole(HF) + 2 * 8
    assert whole(hf | {"tie_word_embeddings": True}) == whole(hf) - 41 * 8


def test_layers_of_interleaved_stages_alternate():
    hf = {"num_hidden_layers": 8}
    assert layers_of_stage(hf, Layout(pp=2, vpp=2), 0) == [0, 1, 4, 5]
    assert layers_of_stage(hf, Layout(pp=2, vpp=2), 1) == [2, 3, 6, 7]


def test_layers_of_uneven_stages():
    hf, layout = {"num_hidden_layers": 61}, Layout(pp=4, first_stage_layers=16, last_stage_layers=15)
    assert [len(layers_of_stage(hf, layout, stage)) for stage in range(4)] == [16, 15, 15, 15]
    assert layers_of_stage(hf, layout, 3) == list(range(46, 61))


def test_which_layers_have_experts():
    deepseek = HF | {"n_routed_experts": 4, "first_k_dense_replace": 1, "num_hidden_layers": 3, "mlp_only_layers": []}
    for hf, sparse in ((HF, [False, True]), (deepseek, [False, True, True]), (HF | {"num_experts": 0}, [False] * 2)):
        assert [layer.experts is not None for layer in layers_of(hf)] == sparse
