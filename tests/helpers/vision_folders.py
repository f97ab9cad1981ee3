"""Tiny folders of Qwen3.5 with a vision part and a layer that predicts further tokens, as on the hub."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, filled
from transformers import PreTrainedModel, Qwen3_5Config, Qwen3_5MoeConfig
from transformers import Qwen3_5ForConditionalGeneration as Dense
from transformers import Qwen3_5MoeForConditionalGeneration as Sparse

_TEXT = {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "full_attention_interval": 2,
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3_5": (Qwen3_5Config, Dense, {}),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Sparse, _EXPERTS | {"shared_expert_intermediate_size": 16}),
}


def write_vision_folder(folder: Path, family: str, *, tied: bool = False) -> PreTrainedModel:
    """Write the folder; the model of vision and text that is in it."""
    config_class, model_class, own = KINDS[family]
    text = SIZES | _TEXT | own | {"tie_word_embeddings": tied}
    torch.manual_seed(0)
    model = filled(model_class(config_class(text_config=text, vision_config=_VISION, tie_word_embeddings=tied)))
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    further = {"mtp.fc.weight": torch.randn(32, 64).bfloat16(), "mtp.norm.weight": torch.randn(32)}
    save_file(stacked(load_file(file)) | further, file, {"format": "pt"})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "preprocessor_config.json").write_text('{"patch_size": 4}')
    return model


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the experts of each layer in two tensors, as on the hub; transformers writes them one by one."""
    found, experts = dict[str, torch.Tensor](), dict[str, dict[str, list[torch.Tensor]]]()
    for name, tensor in tensors.items():
        layer, _, expert = name.partition(".experts.")
        if not expert:
            found[name] = tensor
            continue
        number, kind, _ = expert.split(".")
        of_layer = experts.setdefault(layer, {})
        assert len(of_layer.setdefault(kind, [])) == int(number)
        of_layer[kind].append(tensor)
    for layer, kinds in experts.items():
        both = torch.cat([torch.stack(kinds["gate_proj"]), torch.stack(kinds["up_proj"])], dim=1)
        found |= {f"{layer}.experts.gate_up_proj": both, f"{layer}.experts.down_proj": torch.stack(kinds["down_proj"])}
    return found
