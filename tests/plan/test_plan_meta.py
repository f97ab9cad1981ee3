"""Arithmetic and Megatron's own modules agree on the parameters of every kind of rank of every preset."""

import pytest
import torch.distributed as dist
from preset_files import MINIS as ALL_MINIS
from preset_files import PUBLISHED as ALL_PUBLISHED
from preset_files import distinct_layouts, hf_of
from tiny_models import LACKING

from benchmarks.plan.meta_parameters import built
from megarl.arch.layout import Layout
from megarl.weights.count import kinds_of_stage, of_stage

MINIS, PUBLISHED = (
    [name for name in names if hf_of(name)["model_type"] not in LACKING] for names in (ALL_MINIS, ALL_PUBLISHED)
)


def kinds_of_stages(hf, layout):
    """One stage of each kind: those between the first and the last are alike where their layers are."""
    kinds = {}
    for stage in range(layout.pp):
        place = (stage == 0, stage == layout.pp - 1)
        kinds.setdefault((place, tuple(kinds_of_stage(hf, layout, stage).items())), stage)
    return list(kinds.values())


def assert_agree(name, layouts=None):
    hf = hf_of(name)
    for layout in layouts or distinct_layouts(name):
        for stage in kinds_of_stages(hf, layout):
            assert built(hf, layout, stage) == of_stage(hf, layout, stage), f"{name} {layout} stage {stage}"
        last = layout.pp - 1
        assert built(hf, layout, last, "critic") == of_stage(hf, layout, last, "critic"), f"{name} {layout} critic"


@pytest.mark.parametrize("name", [pytest.param("qwen3_mini", marks=pytest.mark.full), "deepseek_v3_mini"])
def test_minis_agree_in_their_largest_layout(name):
    assert_agree(name, distinct_layouts(name)[-1:])


def test_ranks_that_share_a_head_of_keys_and_values_agree():
    assert_agree("qwen3_mini", [Layout(tp=4, sequence_parallel=True)])


@pytest.mark.full
@pytest.mark.parametrize("name", MINIS)
def test_minis_agree_in_every_layout(name):
    assert_agree(name)


FEW = ("qwen2_5_0_5b", "llama3_2_1b", "qwen3_8b", "mixtral_8x7b")  # the others' families are among theirs
MARKS = dict.fromkeys(PUBLISHED, [pytest.mark.long]) | dict.fromkeys(FEW, [pytest.mark.full])


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) for name in PUBLISHED])
def test_published_models_agree_in_every_layout(name):
    assert_agree(name)


def test_nothing_is_left_behind():
    built(hf_of("qwen3_mini"), Layout(pp=2, vpp=2), 1)
    assert not dist.is_initialized()


def test_a_world_of_many_ranks_is_only_said_to_be():
    hf = hf_of("qwen3_mini") | {"num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8}
    del hf["layer_types"]  # of four layers
    layout = Layout(tp=8, pp=64, cp=2, sequence_parallel=True)
    assert built(hf, layout, 63) == of_stage(hf, layout, 63)
