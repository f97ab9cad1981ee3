"""config.json of a tiny model of each family, as `transformers` writes it, without the model."""

from typing import Any

from tiny_models import FAMILIES, SIZES


def hf_of(family: str, **changes: Any) -> dict[str, Any]:
    kind, own = FAMILIES[family]
    config = kind(**(SIZES | own | {"tie_word_embeddings": False} | changes)).to_dict()
    return config | ({"model_type": family} if family == "kimi_k2" else {})  # transformers has no class of that name
