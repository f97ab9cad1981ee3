"""What the column of routing replay looks like for a model, from its config.json."""

import pytest
from tiny_models import FAMILIES, SIZES
from transformers import Qwen3MoeConfig

from megarl.arch.routed_experts import RoutedExperts


@pytest.mark.parametrize(
    ("family", "layers", "num_experts", "chosen"),
    [
        ("qwen3_moe", (0, 2, 3), 8, 2),  # mlp_only_layers=[1]
        ("qwen3_moe_plain", (0, 1, 2, 3), 4, 2),
        ("mixtral", (0, 1, 2, 3), 4, 2),
        ("deepseek_v3", (1, 2, 3), 16, 4),  # first_k_dense_replace=1; shared experts are not chosen
    ],
)
def test_the_layers_with_experts_of_a_family(
    family: str, layers: tuple[int, ...], num_experts: int, chosen: int
) -> None:
    kind, own = FAMILIES[family]
    assert RoutedExperts.of(kind(**(SIZES | own)).to_dict()) == RoutedExperts(4, layers, num_experts, chosen)


def test_a_model_without_experts_has_no_such_column() -> None:
    kind, own = FAMILIES["qwen3"]
    assert RoutedExperts.of(kind(**(SIZES | own)).to_dict()) is None
    assert RoutedExperts.of({}) is None


def test_every_second_layer_may_have_experts() -> None:
    of = RoutedExperts.of(Qwen3MoeConfig(num_hidden_layers=5, decoder_sparse_step=2, num_experts=8).to_dict())
    assert of is not None
    assert of.layers == (1, 3)


@pytest.mark.parametrize(("num_experts", "dtype", "size"), [(8, "uint8", 1), (256, "uint8", 1), (257, "uint16", 2)])
def test_the_narrowest_type_holds_every_number(num_experts: int, dtype: str, size: int) -> None:
    """256 experts have the numbers 0 to 255."""
    of = RoutedExperts(4, (1, 2, 3), num_experts, chosen=5)
    assert (of.dtype, of.bytes_per_token) == (dtype, 3 * 5 * size)
