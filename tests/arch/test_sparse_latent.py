"""Which layers choose keys by an indexer of their own, as config.json and as Megatron say it."""

import json

import pytest

from megarl.arch.hf_config import completed
from megarl.arch.layers import layers_of
from megarl.arch.layout import layers_that_share, numbers_of
from megarl.arch.settings.families import SETTINGS


def shares_in_megatron(layer: int, offset: int, every: int) -> bool:
    """Of layer `layer`, from 1: `is_dsa_skip_topk_layer` of Megatron-Core 0.19.2."""
    return max(layer - max(offset, 1), 0) % every != 0


@pytest.mark.parametrize("layers", [1, 2, 5, 13])
def test_every_rhythm_of_transformers_is_one_of_megatrons(layers: int) -> None:
    for every in (1, 2, 3, 4):
        for offset in (1, 2, 3):
            own = {"num_hidden_layers": layers, "index_topk_freq": every, "index_skip_topk_offset": offset}
            hf = completed({"model_type": "glm_moe_dsa", "first_k_dense_replace": 0, **own})
            found = SETTINGS[hf["model_type"]](hf)
            rhythm = found["dsa_indexer_skip_topk_offset"], found["dsa_indexer_topk_freq"]
            shared = tuple(layer for layer in range(layers) if hf["indexer_types"][layer] == "shared")
            assert layers_that_share(hf) == shared
            assert tuple(layer for layer in range(layers) if shares_in_megatron(layer + 1, *rhythm)) == shared


@pytest.mark.parametrize(
    ("key", "given"), [("layer_types", {}), ("indexer_types", {"layer_types": ["indexed_attention"] * 4})]
)
def test_typed_numbers_without_the_kinds_of_layers_are_no_other_model(key: str, given: dict[str, object]) -> None:
    typed = {"num_hidden_layers": 4, "index_topk": 32, "index_topk_freq": 2} | given
    with pytest.raises(ValueError, match=f"^config.json: {key} is missing; expected a word for each layer"):
        layers_of({"model_type": "glm_moe_dsa", **typed})


@pytest.mark.parametrize(
    "kinds", [["shared", "full", "full"], ["full", "shared", "full", "full"], ["full", "full"]], ids=json.dumps
)
def test_another_rhythm_is_refused(kinds: list[str]) -> None:
    layers = 4 if len(kinds) == 4 else 3
    hf = completed(
        {"model_type": "glm_moe_dsa", "num_hidden_layers": layers, "indexer_types": kinds, "first_k_dense_replace": 0}
    )
    with pytest.raises(ValueError, match=r"^config.json: indexer_types=.* for all \d$"):
        SETTINGS[hf["model_type"]](hf)


def test_layers_with_experts_are_those_that_transformers_makes_sparse() -> None:
    kinds = ["sparse", "dense", "sparse"]
    hf = completed({"model_type": "deepseek_v32", "num_hidden_layers": 3, "mlp_layer_types": kinds})
    assert SETTINGS[hf["model_type"]](hf)["moe_layer_freq"] == [1, 0, 1]
    assert numbers_of(hf).dense_layers == (1,)
