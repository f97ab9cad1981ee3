"""DeepSeek-V3's settings from its config.json, what is refused, and its router against a slow one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from mla_cases import REAL, see
from spawn import run_ranks

from megarl.layout import Layout
from megarl.mcore.models.mla import deepseek_v3
from megarl.mcore.models.model import check_layout


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return run_ranks(1, see)[0]


def test_the_real_model_is_described() -> None:
    found = deepseek_v3(REAL)
    assert (found["q_lora_rank"], found["kv_lora_rank"]) == (1536, 512)
    assert (found["qk_head_dim"], found["qk_pos_emb_head_dim"], found["v_head_dim"]) == (128, 64, 128)
    assert found["moe_layer_freq"] == [0] * 3 + [1] * 58
    assert found["moe_shared_expert_intermediate_size"] == 2048
    assert (found["moe_router_num_groups"], found["moe_router_group_topk"], found["moe_router_topk"]) == (8, 4, 8)
    assert (found["rope_type"], found["rotary_scaling_factor"], found["mscale"], found["mscale_all_dim"]) == (
        "yarn",
        40.0,
        1.0,
        1.0,
    )
    check_layout(REAL, Layout(tp=8, ep=32, etp=1))


def test_all_groups_or_one_are_no_limit() -> None:
    for groups in (1, 8):
        assert "moe_router_num_groups" not in deepseek_v3(REAL | {"n_group": groups, "topk_group": groups})


def test_yarn_without_mscale_sharpens_by_its_factor_alone() -> None:
    rope = {key: value for key, value in REAL["rope_scaling"].items() if not key.startswith("mscale")}
    found = deepseek_v3(REAL | {"rope_scaling": rope})
    assert (found["mscale"], found["mscale_all_dim"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func=softmax is not supported; expected sigmoid"),
        ({"topk_method": "greedy"}, "topk_method=greedy"),
        ({"norm_topk_prob": False}, "norm_topk_prob=false"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"rope_interleave": False}, "rope_interleave=false"),
        ({"num_key_value_heads": 8}, "num_key_value_heads=8 is not supported; expected 128"),
        ({"head_dim": 128}, "head_dim=128 is not supported; expected 64"),
        ({"n_shared_experts": 0}, "n_shared_experts=0 is not supported; expected at least 1"),
        ({"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, "num_experts_per_tok=1"),
        ({"first_k_dense_replace": 61}, "first_k_dense_replace=61 leaves none of 61 layers experts; expected less"),
        ({"topk_group": 2}, "num_experts_per_tok=8 with topk_group=2 is not supported; expected twice topk_group"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        (
            {"rope_scaling": REAL["rope_scaling"] | {"mscale_all_dim": 0}},
            "both of mscale and mscale_all_dim or neither",
        ),
        ({"rope_scaling": REAL["rope_scaling"] | {"attention_factor": 1.0}}, "no attention_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8'; expected unquantized weights"),
    ],
)
def test_what_megatron_would_do_otherwise_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deepseek_v3(REAL | change)


@pytest.mark.parametrize(
    ("change", "layout", "message"),
    [
        (
            {"q_lora_rank": 1532},
            Layout(tp=8),
            "tensor_model_parallel_size=8 does not divide the model's q_lora_rank=1532",
        ),
        ({"kv_lora_rank": 508}, Layout(tp=8), r"kv_lora_rank \+ qk_rope_head_dim=572"),
        ({}, Layout(ep=48), "expert_model_parallel_size=48 does not divide the model's number of experts=256"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(change: dict[str, Any], layout: Layout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(REAL | change, layout)


def test_latents_are_normed_with_their_own_epsilon(seen: dict[str, Any]) -> None:
    assert seen["latent_eps"] == [1e-6, 1e-6]
    assert seen["other_eps"] == 1e-3


def test_the_softmax_is_scaled_by_the_square_of_mscale(seen: dict[str, Any]) -> None:
    assert seen["scale"] == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(12))


@pytest.mark.parametrize("kind", ["of bf16", "as bf16"])
def test_the_bias_stays_float32_in_a_bf16_model_and_on_its_way_to_one(seen: dict[str, Any], kind: str) -> None:
    found = seen[kind]
    assert found["name"] == "decoder.layers.1.mlp.router.expert_bias"
    assert found["bias"].dtype is found["exported"].dtype is torch.float32
    assert torch.equal(found["exported"], found["bias"])
    assert not torch.equal(found["bias"].bfloat16().float(), found["bias"])
    assert found["other"] is torch.bfloat16


def slow_choice(scores: list[float], bias: list[float], groups: int, best: int, chosen: int) -> dict[int, float]:
    """Expert -> its weight for one token, as the paper and the model's own code say."""
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(scores) // groups
    rank = {g: sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)}
    kept = sorted(rank, key=lambda g: rank[g])[-best:]
    experts = sorted((e for e in range(len(scores)) if e // size in kept), key=lambda e: biased[e])[-chosen:]
    return {e: 2.5 * scores[e] / sum(scores[i] for i in experts) for e in experts}


def test_experts_are_chosen_by_biased_scores_in_the_best_groups(seen: dict[str, Any]) -> None:
    routing = seen["routing"]
    bias, without_bias = routing["bias"].tolist(), 0
    for scores, weights, chosen in zip(*(routing[key] for key in ("scores", "weights", "chosen")), strict=True):
        expected = slow_choice(scores.tolist(), bias, groups=4, best=2, chosen=4)
        assert chosen.nonzero()[:, 0].tolist() == sorted(expected)
        for expert, weight in expected.items():
            assert weights[expert].item() == pytest.approx(weight, rel=1e-5)
        without_bias += sorted(expected) == sorted(slow_choice(scores.tolist(), [0.0] * 16, groups=4, best=2, chosen=4))
    assert 0 < without_bias < 40, "the bias decides here and there"
