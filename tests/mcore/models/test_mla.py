"""DeepSeek-V3's attention and its biases, and its router against a slow one."""

import math
from typing import Any

import pytest
import torch
from hf_configs import hf_of
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from spawn import run_ranks

from megarl.arch.layout import Layout
from megarl.mcore.models.biases import router_biases
from megarl.mcore.models.latent import LatentAttention
from megarl.mcore.models.model import build_model, unwrap
from megarl.mcore.setup import destroy_groups, make_groups
from megarl.weights.hf.export import hf_sizes, hf_tensors

HF = hf_of("deepseek_v3", rms_norm_eps=1e-3)


def see() -> dict[str, Any]:
    """What a rank sees of a small model: models need the shims, which live in ranks."""
    make_groups(Layout())
    try:
        model, bf16 = (unwrap(build_model(HF, Layout(), dtype=dtype)[0]) for dtype in ("float32", "bfloat16"))
        layer = model.decoder.layers[0]
        attention = layer.self_attention
        assert isinstance(attention, LatentAttention)
        return {
            "latent_eps": [attention.q_layernorm.eps, attention.kv_layernorm.eps],
            "other_eps": layer.input_layernorm.eps,
            "scale": attention.softmax_scale,
            "of bf16": biases(bf16),
            "as bf16": biases(model),
            "routing": route(model),
        }
    finally:
        destroy_groups()


def biases(model: GPTModel) -> dict[str, Any]:
    """A random bias, what is exported of it where the servers hold bf16, and the type of another tensor."""
    name, bias = next(iter(router_biases(model)))
    bias.copy_(torch.randn(16, generator=torch.Generator().manual_seed(6)))
    exported = {n: t.clone() for n, t in hf_tensors([model], HF, dtype=torch.bfloat16)}
    assert {n: t.dtype for n, t in exported.items()} == {
        n: dtype for n, (_, dtype) in hf_sizes([model], HF, dtype=torch.bfloat16).items()
    }
    of_hf = exported["model.layers.1.mlp.gate.e_score_correction_bias"]
    return {"name": name, "bias": bias.clone(), "exported": of_hf, "other": exported["lm_head.weight"].dtype}


def route(model: GPTModel) -> dict[str, torch.Tensor]:
    """50 tokens through a router with random weights and a random bias."""
    router = model.decoder.layers[1].mlp.router
    assert isinstance(router, TopKRouter)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        router.weight.copy_(0.5 * torch.randn(16, 32, generator=generator))
        router.expert_bias.copy_(0.5 * torch.randn(16, generator=generator))
        hidden = torch.randn(50, 1, 32, generator=generator)
        weights, chosen = router(hidden)
        scores = (hidden[:, 0] @ router.weight.T).sigmoid()
        return {"scores": scores, "bias": router.expert_bias.clone(), "weights": weights, "chosen": chosen}


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return run_ranks(1, see)[0]


def test_latents_are_normed_with_their_own_epsilon(seen: dict[str, Any]) -> None:
    assert seen["latent_eps"] == [1e-6, 1e-6]
    assert seen["other_eps"] == 1e-3


def test_the_softmax_is_scaled_by_the_square_of_mscale(seen: dict[str, Any]) -> None:
    assert seen["scale"] == pytest.approx((0.1 * 1.3 * math.log(8) + 1) ** 2 / math.sqrt(12))


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
