"""config.json of a tiny model of each family, as `transformers` writes it, without the model."""

from typing import Any

from tiny_models import FAMILIES, SIZES


def hf_of(family: str, **changes: Any) -> dict[str, Any]:
    kind, own = FAMILIES[family]
    made = kind(**(SIZES | own | {"tie_word_embeddings": False} | changes))
    config = made.to_dict() | {"num_hidden_layers": made.num_hidden_layers}  # which not every class writes down
    return config | ({"model_type": family} if family == "kimi_k2" else {})  # transformers has no class of that name
