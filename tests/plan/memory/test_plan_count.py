"""Parameters by arithmetic, against what the models' authors say, transformers, and numbers made by hand."""

from pathlib import Path

import pytest
import torch
from preset_files import MINIS, NAMES, PUBLISHED, hf_of
from transformers import AutoModelForCausalLM

import megarl
from megarl.data.hf_config import config_of
from megarl.layout import Layout
from megarl.mcore.models.families import FAMILIES as BUILT
from megarl.plan.memory.count import FAMILIES, Parameters, check, has_experts, layers_of_stage, of_stage, whole

# As the models' cards and files give them.
TOTALS = {
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_7b": 7_615_616_512,
    "qwen2_5_14b": 14_770_033_664,
    "qwen2_5_32b": 32_763_876_352,
    "qwen2_5_72b": 72_706_203_648,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496,
    "llama3_1_405b": 405_853_388_800,
    "mistral_7b": 7_248_023_552,
    "mistral_7b_v0_1": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_630_071_296,
    "deepseek_v3_671b": 671_026_419_200 - 58 * 256,  # without what is no parameter: a bias for each expert of a layer
    "kimi_k2_1t": 1_026_408_232_448 - 60 * 384,
    # without the biases and the layer of a second token, which has an embedding and a head of its own
    "glm4_5_355b": 358_337_791_296 - 89 * 160 - 5_539_962_272,
    "glm4_5_air_106b": 110_468_824_832 - 45 * 128 - 3_616_573_568,
    "minimax_m2_229b": 228_689_748_992,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
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


def test_a_model_of_another_kind_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match="^config.json: model_type 'gemma2' is not supported; expected one of "):
        check(HF | {"model_type": "gemma2"})
    with pytest.raises(
        ValueError, match="there is no hidden_size, num_experts; expected the config of a qwen3_moe model$"
    ):
        check(HF | {"hidden_size": None, "num_experts": None})


def test_every_published_preset_has_a_known_total():
    assert sorted(TOTALS) == PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_parameters_that_its_authors_count(name):
    assert whole(hf_of(name)) == TOTALS[name]


def test_the_page_of_models_gives_these_totals():
    page = (Path(megarl.__file__).parents[1] / "docs" / "parallelism.md").read_text()
    assert not [name for name, total in TOTALS.items() if f"| `{name}` | {total:,} |" not in page]


@pytest.mark.parametrize("name", ["qwen2_5_0_5b", "llama3_2_1b", "mistral_7b_v0_1", "qwen3_30b_a3b", *MINIS])
def test_transformers_makes_a_model_of_so_many_parameters(name):
    assert whole(hf_of(name)) == parameters_of_transformers(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_transformers_makes_every_preset_of_so_many_parameters(name):
    assert whole(hf_of(name)) == parameters_of_transformers(name)


def parameters_of_transformers(name: str) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(hf_of(name)))
    return sum(parameter.numel() for name, parameter in model.named_parameters() if "mtp" not in name)


def test_the_parts_of_a_model():
    dense = ATTENTION + NORMS + 3 * 8 * 12
    sparse = ATTENTION + NORMS + 8 * 4  # the router
    ends = 40 * 8 + 8 + 40 * 8  # embedding, norm, head
    assert of_stage(HF, Layout(), 0) == Parameters(dense + sparse + ends, 4 * 3 * 8 * 6)
    assert of_stage(HF, Layout(), 0, "critic") == Parameters(dense + sparse + 40 * 8 + 8 + 8, 4 * 3 * 8 * 6)


def test_a_stage_has_its_own_layers_and_ends():
    layout = Layout(pp=2)
    assert of_stage(HF, layout, 0) == Parameters(ATTENTION + NORMS + 3 * 8 * 12 + 40 * 8, 0)
    assert of_stage(HF, layout, 1) == Parameters(ATTENTION + NORMS + 8 * 4 + 8 + 40 * 8, 4 * 3 * 8 * 6)


def test_norms_and_routers_are_whole_on_every_rank():
    layout = Layout(tp=2, ep=2, etp=2, sequence_parallel=True)
    dense = 2 * (ATTENTION // 2 + NORMS) + 3 * 8 * 12 // 2 + 8 * 4
    ends = 24 * 8 + 8 + 24 * 8  # 40 rows are padded to 48, which two ranks share
    assert of_stage(HF, layout, 0) == Parameters(dense + ends, 2 * 3 * 8 * 6 // 2)


def test_a_whole_model_is_counted_without_padding():
    hf = HF | {"vocab_size": 41}
    assert whole(hf) == whole(HF) + 2 * 8
    assert whole(hf | {"tie_word_embeddings": True}) == whole(hf) - 41 * 8


def test_the_last_stage_has_a_copy_of_a_tied_table():
    hf = HF | {"tie_word_embeddings": True}
    assert of_stage(hf, Layout(pp=2), 1) == of_stage(HF, Layout(pp=2), 1)
    assert of_stage(hf, Layout(), 0).dense == of_stage(HF, Layout(), 0).dense - 40 * 8


def test_biases_are_those_of_qwen2():
    hf = {key: value for key, value in HF.items() if "expert" not in key} | {"model_type": "qwen2"}
    plain = of_stage(hf | {"model_type": "llama"}, Layout(tp=2), 0).dense
    assert of_stage(hf, Layout(tp=2), 0).dense == plain + 2 * (16 + 2 * 8) // 2


def test_layers_of_interleaved_stages_alternate():
    hf = {"num_hidden_layers": 8}
    assert layers_of_stage(hf, Layout(pp=2, vpp=2), 0) == [0, 1, 4, 5]
    assert layers_of_stage(hf, Layout(pp=2, vpp=2), 1) == [2, 3, 6, 7]


def test_layers_of_uneven_stages():
    hf, layout = {"num_hidden_layers": 61}, Layout(pp=4, first_stage_layers=16, last_stage_layers=15)
    assert [len(layers_of_stage(hf, layout, stage)) for stage in range(4)] == [16, 15, 15, 15]
    assert layers_of_stage(hf, layout, 3) == list(range(46, 61))


def test_which_layers_have_experts():
    assert [has_experts(HF, layer) for layer in range(2)] == [False, True]
    deepseek = {"n_routed_experts": 4, "first_k_dense_replace": 1}
    assert [has_experts(deepseek, layer) for layer in range(3)] == [False, True, True]
    assert not has_experts({}, 0)
