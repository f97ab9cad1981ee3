"""Writes a tiny model with random weights and a tokenizer of single characters, as an ordinary Hugging Face folder.

It is loaded as a real model is (config.json, safetensors, tokenizer, chat template) and is small enough for two CPU
cores.  Its weights are random, so it needs a cold start (SFT) before RL.
"""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    GenerationConfig,
    Glm4MoeConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.utils import logging

from megarl.data.examples.sizes import TinySizes

_DEEPSEEK_V3: dict[str, Any] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "head_dim": 16,  # transformers' name for the rotary part
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 96,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,  # this and the next two are read by SGLang, not by transformers
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "rope_parameters": {  # as in the real model; the only type that SGLang supports without a GPU
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}
# Its experts have the keys of DeepSeek-V3's.
_GLM4_MOE = {key: _DEEPSEEK_V3[key] for key in _DEEPSEEK_V3 if "expert" in key or "group" in key or "moe" in key} | {
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 2.5,
    "attention_bias": True,
    "use_qk_norm": True,
}
_KIMI_ROPE = {"rope_theta": 50000.0, "beta_fast": 1.0}

_MINIMAX_M2 = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rotary_dim": 4,
    "use_qk_norm": True,  # this and the next three are read by SGLang, not by transformers
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
}

_GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}

_QWEN3_5 = {
    "full_attention_interval": 2,  # the first layer is a gated delta net, the second gated attention, and so on
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_QWEN3_NEXT = _QWEN3_5 | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
}

_SPARSE_LATENT = _DEEPSEEK_V3 | {
    "index_topk": 32,
    "index_head_dim": 32,
    "index_n_heads": 16,
}
_GLM5 = {
    "index_topk_freq": 2,
    "index_skip_topk_offset": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_NEMOTRON_LAYERS = ("linear_attention", "moe", "full_attention", "mlp")  # one after another, again and again
_NEMOTRON = {
    "tie_word_embeddings": False,  # transformers does not tie them
    "ssm_state_size": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 96,
    "routed_scaling_factor": 2.5,
}

# The config class of each family, and its settings in addition to the common sizes.
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {}),
    "qwen2": (Qwen2Config, {}),
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True},
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "deepseek_v3": (DeepseekV3Config, _DEEPSEEK_V3),
    "glm4_moe": (Glm4MoeConfig, _GLM4_MOE),
    "minimax_m2": (MiniMaxM2Config, _MINIMAX_M2),
    "gpt_oss": (GptOssConfig, _GPT_OSS),
    "qwen3_next": (Qwen3NextConfig, _QWEN3_NEXT),
    "qwen3_5_text": (Qwen3_5TextConfig, _QWEN3_5),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, _QWEN3_NEXT),
    "deepseek_v32": (DeepseekV32Config, _SPARSE_LATENT),
    "glm_moe_dsa": (GlmMoeDsaConfig, _SPARSE_LATENT | _GLM5),
    "nemotron_h": (NemotronHConfig, _NEMOTRON),
    "kimi_k2": (DeepseekV3Config, _DEEPSEEK_V3 | {"rope_parameters": _DEEPSEEK_V3["rope_parameters"] | _KIMI_ROPE}),
}

DEFAULT_SIZES = TinySizes()
SPECIAL_TOKENS = ["<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>"]
CHARACTERS = string.digits + "+-*/= " + string.ascii_letters + "\n!\"#$%&'(),.:;<>?@[\\]^_`{|}~"

# Tools are shown by their names only; calls have the form of Hermes and Qwen.
CHAT_TEMPLATE = """\
{%- if tools %}{{ '<system>' + tools | map(attribute='function.name') | join(' ') + '<eos>' }}{% endif %}
{%- for message in messages %}
    {{- '<' + message['role'] + '>' + (message['content'] or '') }}
    {%- for call in message.get('tool_calls') or [] %}
        {{- '<tool_call>' }}
        {{- {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}
        {{- '</tool_call>' }}
    {%- endfor %}
    {{- '<eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""


def tiny_tokenizer(words: Sequence[str] = (), characters: Sequence[str] = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token per character, by default of printable ASCII; others are <unk>.  `<eos>` ends an answer.

    words: further tokens, of several characters each, such as "<tool_call>": a tiny model learns few tokens faster.
    """
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=["<system>", "<user>", "<assistant>"],
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens([AddedToken(word, normalized=False) for word in words])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_tiny_model(
    folder: str | Path,
    sizes: TinySizes = DEFAULT_SIZES,
    *,
    seed: int = 0,
    dtype: str = "float32",
    family: str = "qwen3",
    tied: bool = True,
    words: Sequence[str] = (),
    characters: Sequence[str] = CHARACTERS,
    **settings: Any,
) -> Path:
    """Write config, weights and tokenizer; returns the folder.  The same arguments always give the same weights.

    `words`, `characters`: of the tokenizer.
    `settings`: further keys of the family's config.json; they override those of FAMILIES.
    The folder is written atomically.  Raises ValueError for an unknown family, impossible sizes, or a folder that is
    not empty.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder}: the folder is not empty; expected a new one")
    tokenizer = tiny_tokenizer(words, characters)
    _check_sizes(family, sizes)
    kind, own = FAMILIES[family]
    common = {
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads if "kv_lora_rank" in own else sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.ffn,
        "max_position_embeddings": sizes.max_positions,
        "tie_word_embeddings": tied,
    }
    if kind is NemotronHConfig:
        own = {"layers_block_type": [*islice(cycle(_NEMOTRON_LAYERS), sizes.layers)], **own}
    config = kind(
        **(common | own | settings),
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return _write(folder, config, tokenizer, seed=seed, dtype=dtype, family=family)


def write_random_model(folder: str | Path, config: Mapping[str, Any], *, seed: int = 0) -> Path:
    """Write random float32 weights of the model with this config.json, and a tokenizer of characters.

    Raises ValueError for an unknown `model_type`, and for fewer tokens than the tokenizer has.
    """
    tokenizer, family = tiny_tokenizer(), config["model_type"]
    if family not in FAMILIES or config["vocab_size"] < len(tokenizer):
        wanted = f"expected one of {', '.join(FAMILIES)} and at least {len(tokenizer)} tokens"
        raise ValueError(f"model_type={family} with vocab_size={config['vocab_size']}: {wanted}")
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    made = FAMILIES[family][0](**{key: value for key, value in config.items() if key != "model_type"} | ids)
    return _write(Path(folder), made, tokenizer, seed=seed, dtype="float32", family=family)


def _write(
    folder: Path, config: Any, tokenizer: PreTrainedTokenizerFast, *, seed: int, dtype: str, family: str
) -> Path:
    """The folder, written atomically."""
    with torch.random.fork_rng(devices=[]):  # keeps the caller's random state
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)

    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    with _quiet():
        model.save_pretrained(unfinished)
    file = unfinished / "config.json"  # of kimi_k2 it names the family whose class it was written with
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": family}, indent=2))
    tokenizer.save_pretrained(unfinished)
    unfinished.replace(folder)  # also over an empty folder
    return folder


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_sizes(family: str, sizes: TinySizes) -> None:
    """Raises ValueError for an unknown family, or sizes that it does not support."""
    if family not in FAMILIES:
        raise ValueError(f"family={family!r}: expected one of {', '.join(FAMILIES)}")
    hidden, heads, kv_heads = sizes.hidden, sizes.heads, sizes.kv_heads
    if heads % kv_heads:
        raise ValueError(f"heads={heads}, kv_heads={kv_heads}: expected heads to be a multiple of kv_heads")
    if family == "qwen2" and sizes.head_dim * heads != hidden:
        raise ValueError(
            f"head_dim={sizes.head_dim}: expected hidden / heads for qwen2, whose config has no such field; "
            f"hidden={hidden}, heads={heads}"
        )
