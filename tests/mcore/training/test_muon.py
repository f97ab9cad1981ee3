"""Newton-Schulz, and which parameters are matrices; steps by the formula are in tests/dist/test_engine.py."""

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megarl.mcore.training.muon import muon_matrices, newton_schulz


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
    cut = {
        "linear_qkv.weight": 0,
        "linear_proj.weight": 1,
        "local_experts.1.linear_fc1.weight": 0,
        "linear_fc2.weight3": 1,
    }
    for end, dim in cut.items():
        (param,) = [param for name, param in params.items() if name.endswith(end)]
        param.tensor_model_parallel, param.partition_dim = True, dim
    params["decoder.layers.1.mlp.router.weight"] = nn.Parameter(torch.zeros(4, 8), requires_grad=False)
    found = muon_matrices(params.items(), config)
    names = {name: found[param] for name, param in params.items() if param in found}
    assert {name.removeprefix("decoder.layers.0."): (m.dim, m.rows) for name, m in names.items()} == {
        "self_attention.linear_qkv.weight": (0, (6, 3, 3)),
        "self_attention.linear_proj.weight": (1, ()),
        "mlp.linear_fc1.weight": (None, (10, 10)),
        "mlp.linear_fc2.weight": (None, ()),
        "mlp.router.weight": (None, ()),
        "mlp.experts.local_experts.1.linear_fc1.weight": (0, (3, 3)),
        "mlp.experts.linear_fc2.weight3": (1, ()),
    }
