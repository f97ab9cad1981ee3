"""Newton-Schulz, and how fused and cut parameters are taken apart; whole steps are in tests/dist/test_engine.py."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megarl.mcore.training.muon import Matrix, Muon, muon_matrices, newton_schulz


class Group:
    """A process group of one."""

    def size(self) -> int:
        return 1


ALONE = Group()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(6, 6), (5, 9), (9, 5)])
def test_singular_values_come_near_one_and_directions_stay(shape: tuple[int, int]) -> None:
    x = random(*shape)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    made = u.T @ newton_schulz(x) @ vh.T
    assert (made - torch.diag(made.diag())).abs().max() < 1e-4
    assert 0.6 < made.diag().min() <= made.diag().max() < 1.3


def test_size_and_sign_of_a_number() -> None:
    assert newton_schulz(torch.tensor([[-1e-3]])) == pytest.approx(-newton_schulz(torch.tensor([[5.0]])))
    assert newton_schulz(torch.zeros(2, 2)).abs().max() == 0


def test_an_update_is_as_large_as_one_of_adamw() -> None:
    update = Matrix(ALONE, None).orthogonal(random(64, 64))
    assert update.square().mean().sqrt() == pytest.approx(0.2, rel=0.3)  # AdamW moves most entries by 0.2 to 0.4


def test_projections_of_one_parameter_are_matrices_of_their_own() -> None:
    """Two groups of heads, each with 4 rows of q, 2 of k, 2 of v."""
    x = random(16, 8)
    made = Matrix(ALONE, None, (4, 2, 2)).orthogonal(x)
    for rows, start in ((4, 0), (2, 4), (2, 6)):
        at = [group * 8 + start + row for group in range(2) for row in range(rows)]
        expected = newton_schulz(x[at]) * 0.2 * math.sqrt(max(x[at].shape))
        assert torch.allclose(made[at], expected, atol=1e-6)


@pytest.mark.usefixtures("one_rank")
def test_which_parameters_are_matrices() -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=4, num_query_groups=2, kv_channels=3, gated_linear_unit=True
    )
    shapes = {
        "embedding.word_embeddings.weight": (8, 8),
        "output_layer.weight": (8, 8),
        "decoder.final_layernorm.weight": (8,),
        "decoder.layers.0.input_layernorm.weight": (8,),
        "decoder.layers.0.self_attention.linear_qkv.weight": (24, 8),
        "decoder.layers.0.self_attention.linear_qkv.bias": (24,),
        "decoder.layers.0.self_attention.linear_proj.weight": (8, 12),
        "decoder.layers.0.mlp.linear_fc1.weight": (20, 8),
        "decoder.layers.0.mlp.linear_fc2.weight": (8, 10),
        "decoder.layers.0.mlp.router.weight": (4, 8),
        "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight": (6, 8),
        "decoder.layers.0.mlp.experts.linear_fc2.weight3": (8, 3),
    }
    params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    found = muon_matrices(params.items(), config)
    names = {name: found[param] for name, param in params.items() if param in found}
    assert {name.removeprefix("decoder.layers.0."): (m.dim, m.rows) for name, m in names.items()} == {
        "self_attention.linear_qkv.weight": (None, (6, 3, 3)),
        "self_attention.linear_proj.weight": (None, ()),
        "mlp.linear_fc1.weight": (None, (10, 10)),
        "mlp.linear_fc2.weight": (None, ()),
        "mlp.router.weight": (None, ()),
        "mlp.experts.local_experts.1.linear_fc1.weight": (0, (3, 3)),
        "mlp.experts.linear_fc2.weight3": (1, ()),
    }


def test_a_frozen_matrix_is_left_out() -> None:
    frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    assert muon_matrices([("decoder.layers.0.mlp.router.weight", frozen)], config) == {}


def test_the_first_steps_by_hand() -> None:
    """A matrix of one number moves by lr * 0.2 * p^5(1) whatever the gradient; a bias by AdamW's lr."""
    weight, bias = nn.Parameter(torch.tensor([[2.0]])), nn.Parameter(torch.tensor([1.0]))
    groups = [{"params": [weight], "weight_decay": 0.5}, {"params": [bias], "weight_decay": 0.0}]
    muon = Muon(groups, {weight: Matrix(ALONE, None)}, lr=0.1, momentum=0.9, betas=(0.9, 0.999), eps=0.0)
    weight.grad, bias.grad = torch.tensor([[-30.0]]), torch.tensor([7.0])
    muon.step()
    one = newton_schulz(torch.ones(1, 1)).item()
    assert weight.item() == pytest.approx(2.0 * 0.95 + 0.1 * 0.2 * one)
    assert bias.item() == pytest.approx(0.9, rel=1e-5)
    assert muon.state[weight]["momentum_buffer"].item() == pytest.approx(-3.0)
    assert [group["step"] for group in muon.param_groups] == [1, 1]
