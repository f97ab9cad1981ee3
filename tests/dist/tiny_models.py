"""Tiny HF folders for the tests: every weight random, none at its initial 0 or 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen3Config

SIZES: dict[str, Any] = {
    "vocab_size": 45,  # padded to 48: rank 1 of two holds 21 rows and 3 of padding
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 0,
}


def tiny_model(family: str, *, tied: bool, seed: int = 0, **sizes: Any) -> PreTrainedModel:
    common = SIZES | sizes | {"tie_word_embeddings": tied}
    config = Qwen2Config(**common) if family == "qwen2" else Qwen3Config(**common, head_dim=16)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(torch.randn_like(param) * 0.2 + (1.0 if "norm" in name else 0.0))
    return model.eval()


def write_model(folder: Path, family: str, *, tied: bool, max_shard_size: str = "1GB", **sizes: Any) -> Path:
    """A folder as `transformers` writes it, with a stand-in for the tokenizer's files."""
    tiny_model(family, tied=tied, **sizes).save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
