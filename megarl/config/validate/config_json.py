"""Reads the config.json of a model's folder and checks the types of the fields that later checks compute with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.config.settings import ConfigError, show

Test = Callable[[Any], bool]


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_SIZE: tuple[Test, str] = (lambda v: _is_whole(v, 1), "an integer of at least 1")
_COUNT: tuple[Test, str] = (lambda v: _is_whole(v, 0), "an integer of at least 0")
_GROUP: tuple[Test, str] = (lambda v: isinstance(v, dict), "a group of fields")
_TEXT: tuple[Test, str] = (lambda v: isinstance(v, str), "text")
_FIELDS: dict[str, tuple[Test, str]] = {
    **dict.fromkeys(
        (
            *("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim"),
            *("intermediate_size", "vocab_size", "max_position_embeddings", "decoder_sparse_step"),
        ),
        _SIZE,
    ),
    **dict.fromkeys(
        (
            *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
            *("moe_intermediate_size", "first_k_dense_replace", "q_lora_rank", "kv_lora_rank"),
            *("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        ),
        _COUNT,
    ),
    # Bounded, as classes of transformers make a list of as many kinds of layers.
    "num_hidden_layers": (lambda v: _is_whole(v, 1) and v <= 10_000, "an integer from 1 to 10000"),
    "model_type": _TEXT,
    "architectures": (lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v), "a list of texts"),
    "mlp_only_layers": (lambda v: isinstance(v, list) and all(_is_whole(x, 0) for x in v), "a list of layers from 0"),
    "quantization_config": _GROUP,
    "rope_scaling": _GROUP,
    "rope_parameters": _GROUP,
}
_ROPE: dict[str, tuple[Test, str]] = {
    "original_max_position_embeddings": _SIZE,
    "factor": (
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < float("inf"),
        "a number above 0",
    ),
}


def read_object(file: Path) -> dict[str, Any]:
    """The fields of a JSON file.  Raises: ConfigError, one sentence that begins with "its NAME", if there are none."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"its {file.name} cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"its {file.name} is {type(found).__name__}, expected an object of fields")
    return found


def invalid_fields(hf: Mapping[str, Any]) -> Iterator[str]:
    """One sentence, `FIELD=VALUE: expected ...`, for each field of a config.json that is of another type."""
    yield from _invalid(hf, _FIELDS, "")
    for group in ("rope_scaling", "rope_parameters"):
        rope = hf.get(group)
        if isinstance(rope, dict):
            yield from _invalid(rope, _ROPE, f"{group}.")


def _invalid(fields: Mapping[str, Any], rules: dict[str, tuple[Test, str]], prefix: str) -> Iterator[str]:
    for name, (test, wanted) in rules.items():
        value = fields.get(name)
        if value is not None and not test(value):
            yield f"{prefix}{name}={show(value)}: expected {wanted}"
