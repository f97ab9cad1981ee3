"""How models of each family are built: their settings, Megatron's class of settings, and their layers.

A family is added by one entry of FAMILIES; `model.py` knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.mcore.models.gpt_oss import gpt_oss
from megarl.mcore.models.layers import LayerSpec, local_layer
from megarl.mcore.models.mla import latent_layer
from megarl.mcore.models.qk_norm import layer_with_norms_of_all_heads
from megarl.model_settings.families import SETTINGS
from megarl.model_settings.hf import HFConfig, Settings
from megarl.model_types import refusal


@dataclass(frozen=True)
class Family:
    """How models of one `model_type` are built."""

    settings: Callable[[HFConfig], Settings]  # fields of `config`; ValueError of one sentence if not supported
    config: type[TransformerConfig] = TransformerConfig
    layer: LayerSpec = local_layer


def family_of(hf: HFConfig) -> Family:
    """Raises ValueError for a model_type that is not in FAMILIES."""
    model_type = hf.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(refusal(model_type, FAMILIES))
    return FAMILIES[model_type]


FAMILIES: dict[str, Family] = {kind: Family(settings) for kind, settings in SETTINGS.items()} | {
    "deepseek_v3": Family(SETTINGS["deepseek_v3"], MLATransformerConfig, latent_layer),
    "kimi_k2": Family(SETTINGS["kimi_k2"], MLATransformerConfig, latent_layer),
    "minimax_m2": Family(SETTINGS["minimax_m2"], layer=layer_with_norms_of_all_heads),
    "gpt_oss": Family(gpt_oss),
}
