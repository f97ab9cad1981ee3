"""config.json as transformers reads it: the one reader of all numbers that enter the arithmetic.

Ranks, conversion, planner, checks and the hf engine compute with what the family's configuration class makes of a
config.json: keys that are absent have its defaults, and each quantity has one name.  SGLang reads through the same
classes.  No code of a folder is run.  Transformers, which loads torch, is imported only when a file is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Families, by model_type, that can be trained; each has the settings, modules and tables that are named after it.
SUPPORTED = (
    *("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "mixtral", "deepseek_v3", "kimi_k2", "glm4_moe"),
    *("minimax_m2", "gpt_oss", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v32", "glm_moe_dsa"),
    "nemotron_h",
)
# Families whose folders have a vision part -> that of their text part, which is what is trained and served.
TEXT_OF = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
# Families whose class is code in their repositories -> the family of transformers whose model they are.
SAME_MODEL = {"kimi_k2": "deepseek_v3"}
# Bounded, as transformers and the tables of names make a list of as many; files tell whether other sizes are true.
_MOST = {
    "num_hidden_layers": 10_000,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), 100_000),
}
# Names by which a model is told to have experts, latents, indexers or states; in a family without them they mean none.
_TELLING = {
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "moe_intermediate_size"),
    *("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers", "kv_lora_rank", "q_lora_rank"),
    *("mlp_layer_types", "index_topk", "indexer_types"),
    *("linear_num_key_heads", "mamba_num_heads", "layers_block_type"),
}


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The numbers of the config.json of a folder, `completed`.  Raises ValueError, also if there is no such file."""
    try:
        return completed(_read(folder))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def read_config(folder: str | Path) -> PretrainedConfig:
    """Of a folder, for transformers' models; one of SAME_MODEL as the family of transformers."""
    return config_of(_read(folder))


def has_vision_part(hf: Mapping[str, Any]) -> bool:
    return str(hf.get("model_type")) in TEXT_OF


def text_part(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The numbers of the text part alone, of a config.json that has a vision part too; of another one all.

    Raises ValueError of one sentence for a text part that is missing or of another family, and for tied embeddings on
    which the two parts differ: transformers takes either, depending on the class that it loads.
    """
    if not has_vision_part(hf):
        return hf
    kind = TEXT_OF[hf["model_type"]]
    text = hf.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type", kind) != kind:
        raise ValueError(
            f"config.json: model_type={hf['model_type']!r} without a text_config of {kind!r}; expected one"
        )
    own, outer = (bool(part.get("tie_word_embeddings")) for part in (text, hf))
    if own != outer:
        raise ValueError(
            f"config.json: tie_word_embeddings is {json.dumps(outer)}, and in text_config {json.dumps(own)}; expected "
            "the same in both"
        )
    return {**text, "model_type": kind}


def completed(hf: Mapping[str, Any]) -> dict[str, Any]:
    """What the class of its family makes of a config.json: all keys that the class has, and those that it ignores.

    Of a model with a vision part, what that of its text part makes of this part.  The file of a family which cannot be
    trained stays as it is.  Raises ValueError of one sentence for a file that the class refuses, and for two
    descriptions of the rotary embedding that differ.
    """
    hf = text_part(hf)
    if hf.get("model_type") not in SUPPORTED:
        return dict(hf)
    config = config_of(hf)
    own = {config.attribute_map.get(name, name) for name in config.__dataclass_fields__}
    held = {key: value for key, value in config.to_dict().items() if key in own or key not in _TELLING}
    # NemotronHConfig counts its layers and does not write down how many there are.
    return {**held, "model_type": hf["model_type"], "num_hidden_layers": config.num_hidden_layers}


def config_of(hf: Mapping[str, Any]) -> PretrainedConfig:
    """Of the numbers of a config.json.  Raises as `completed` does, also for a family that transformers lacks."""
    hf = text_part(hf)
    for name, most in _MOST.items():
        if isinstance(number := hf.get(name), int) and number > most:
            raise ValueError(f"config.json: {name}={number}; expected at most {most}")
    for name in ("dtype", "torch_dtype"):
        if not isinstance(kind := hf.get(name), str | None):
            raise ValueError(f"config.json: {name}={json.dumps(kind, default=str)}; expected a name, as bfloat16")
    if file := hf.get("transformers_weights"):
        raise ValueError(f"config.json: transformers_weights={json.dumps(file)}; expected weights in model.safetensors")
    config = _config_of(hf)
    both = ("rope_parameters", "rope_scaling")
    if all(hf.get(name) for name in both):
        one, other = (_rope({key: hf[key] for key in hf if key not in both or key == name}) for name in both)
        if one != other:  # the class would take rope_scaling, and lose what is said in rope_parameters alone
            raise ValueError(
                f"config.json: rope_parameters says {json.dumps(one)} and rope_scaling {json.dumps(other)}; expected "
                "one of the two keys"
            )
    return config


def of_transformers(hf: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The config.json for transformers' own class of a family; `kind`: what the model is for, as ForCausalLM.

    `auto_map` is left out where transformers needs no code of the folder.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family = SAME_MODEL.get(hf["model_type"], hf["model_type"])
    kept = {key: value for key, value in hf.items() if key != "auto_map" or hf["model_type"] not in CONFIG_MAPPING}
    return kept | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family].removesuffix("ForCausalLM") + kind]}


def _read(folder: str | Path) -> dict[str, Any]:
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ValueError("there is no config.json; expected the folder of a Hugging Face model")
    found = json.loads(file.read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"config.json: it is {type(found).__name__}; expected an object of fields")
    return found


def _family(hf: Mapping[str, Any]) -> str:
    """The name under which transformers has the class."""
    kind = str(hf.get("model_type"))
    if kind == "mistral" and "layer_types" in hf:  # as its AutoConfig does
        return "ministral"
    return SAME_MODEL.get(kind, kind)


def _config_of(hf: Mapping[str, Any]) -> PretrainedConfig:
    from transformers import AutoConfig

    given = {key: _floats_of(value) for key, value in hf.items() if key not in ("model_type", "auto_map")}
    try:
        config = AutoConfig.for_model(_family(hf), **given)
        if getattr(config, "rope_parameters", None) is not None:  # as its models do, and not all have positions
            config.standardize_rope_params()  # only now original_max_position_embeddings is heard
    except Exception as error:  # transformers cannot read this file, for any reason
        said = f"config.json: transformers refuses it for model_type={hf.get('model_type')!r}"
        raise ValueError(f"{said} ({' '.join(str(error).split())})") from None
    if "layer_types" in config.__dataclass_fields__ and "sliding_attention" not in config.layer_types:
        config.sliding_window = None  # of no layer
    return config


def _floats_of(value: Any) -> Any:
    """A copy with the numbers that JSON has not, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, list | tuple):
        return [_floats_of(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    return float(value["__float__"]) if set(value) == {"__float__"} else {k: _floats_of(v) for k, v in value.items()}


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Its rotary embedding in one form."""
    held = _config_of(hf).rope_parameters
    return {key: held[key] for key in sorted(held) if key != "type" and held[key] is not None}
