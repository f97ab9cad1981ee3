"""What autograd keeps for the backward pass of a layer, tensor by tensor, against the planner's numbers per token."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from preset_files import hf_of
from saved_tensors import Kept, kept_by_a_layer, with_again
from spawn import Ranks
from tiny_models import tiny_model
from torch import nn

from megarl.arch.layout import Layout
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.fusions import fusions
from megarl.plan.memory import kept_numbers, kept_scores, locally_kept
from megarl.weights.count import kinds_of

TOKENS, HIDDEN, WIDTH = 10, 8, 32
LOCAL = ExecutionOptions(transformer_impl="local")


class Linear(nn.Linear):
    """Keeps its input, as Transformer-Engine's linear does, and gives back a bias as Megatron's modules do."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


def feed_forward(*, fused: bool) -> MLP:
    """Megatron's own, with linears that need no process group."""
    made = MLP.__new__(MLP)
    nn.Module.__init__(made)
    made.activation_func = F.silu
    made.config = SimpleNamespace(
        use_te_activation_func=False, bias_activation_fusion=fused, gated_linear_unit=True, activation_func=F.silu,
        activation_func_clamp_value=None, activation_func_fp8_input_store=False, glu_linear_offset=0.0,
        cpu_offloading=False, cpu_offloading_activations=False,
    )  # fmt: skip
    made.linear_fc1, made.linear_fc2 = Linear(HIDDEN, 2 * WIDTH, bias=False), Linear(WIDTH, HIDDEN, bias=False)
    return made


@pytest.mark.parametrize(("fused", "times"), [(True, 3), (False, 5)])
@pytest.mark.parametrize("of_expert", [False, True])
def test_a_gated_feed_forward_keeps_three_widths_fused_and_five_apart(fused: bool, times: int, of_expert: bool) -> None:
    model = feed_forward(fused=fused)
    tokens = torch.randn(TOKENS, *[] if of_expert else [1], HIDDEN, requires_grad=True)
    scale = torch.rand(TOKENS, requires_grad=True) if of_expert else None  # the router's probabilities
    with torch.compiler.set_stance("force_eager"), Kept(model.parameters()) as found:
        model(tokens, per_token_scale=scale)
    apart = of_expert and not fused  # the product before it is scaled, too
    scales = 0 if scale is None else TOKENS
    assert found.num_bytes == 4 * (TOKENS * (HIDDEN + (times + apart) * WIDTH) + scales)


def test_the_layers_of_transformer_engine_are_planned_with_the_fused_activation() -> None:
    hf = hf_of("qwen3_mini")
    widths = {"intermediate_size": hf["intermediate_size"] + 100}
    for counted in (kept_numbers, locally_kept):
        wider, narrow = (counted(kinds_of(each)[0], hf["hidden_size"], Layout()) for each in (hf | widths, hf))
        assert wider - narrow == 3 * 100
    of_gpu = {"gpu": True, "transformer_engine": True, "permutation": True, "accumulation": True}
    assert fusions(**of_gpu, latent_attention=False)["bias_activation_fusion"]


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


def kept(ranks: Ranks, hf: dict[str, Any], again: tuple[str, ...]) -> float:
    return ranks.run(kept_by_a_layer, hf, with_again(LOCAL, again))[0]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("preset", "again"),
    [
        ("qwen2_5_mini", ()),
        ("qwen3_mini", ()),
        ("qwen3_mini", ("mlp",)),
        ("qwen3_moe_mini", ("moe",)),
    ],
)
def test_a_local_layer_keeps_what_is_planned(one_rank: Ranks, preset: str, again: tuple[str, ...]) -> None:
    hf = hf_of(preset)
    assert kept(one_rank, hf, again) == locally_kept(kinds_of(hf)[0], hf["hidden_size"], Layout(), again)


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.megatron_0_19
@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_a_layer_of_qwen3_5_keeps_what_is_planned_within_a_hundredth(one_rank: Ranks, kind: str) -> None:
    hf = hf_of("qwen3_5_mini") | {"layer_types": [kind] * 4}
    assert kept(one_rank, hf, ()) == pytest.approx(locally_kept(kinds_of(hf)[0], 64, Layout()), rel=0.01)


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.megatron_0_19
def test_a_mamba_layer_keeps_what_is_planned_within_a_hundredth(one_rank: Ranks) -> None:
    hf = hf_of("nemotron_h_mini") | {"layers_block_type": ["linear_attention"] * 8}
    assert kept(one_rank, hf, ()) == pytest.approx(locally_kept(kinds_of(hf)[0], 64, Layout()), rel=0.01)


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.megatron_0_19
def test_a_layer_with_an_indexer_keeps_scores_of_the_whole_row(one_rank: Ranks) -> None:
    hf = hf_of("deepseek_v3_2_mini") | {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"] * 4}
    kind = kinds_of(hf)[0]
    planned = locally_kept(kind, 64, Layout()) + kept_scores(kind, Layout(), 512, 4)
    assert kept(one_rank, hf, ()) == pytest.approx(planned, rel=0.03)


@pytest.mark.dist
def test_shared_experts_that_are_computed_again_save_what_is_planned(one_rank: Ranks) -> None:
    hf = tiny_model("glm4_moe", tied=False).config.to_dict() | {"first_k_dense_replace": 0}
    without, again = (kept(one_rank, hf, modules) for modules in ((), ("shared_experts",)))
    kind, hidden = kinds_of(hf)[0], hf["hidden_size"]
    planned = [locally_kept(kind, hidden, Layout(), modules) for modules in ((), ("shared_experts",))]
    assert without - again == planned[0] - planned[1] == 3 * hf["moe_intermediate_size"] * hf["n_shared_experts"]
