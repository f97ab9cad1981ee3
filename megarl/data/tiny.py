"""A tiny model with random weights and a tokenizer of single characters, as an ordinary Hugging Face folder.

It goes through every door that a real model goes through (config.json, safetensors, tokenizer, chat template) and is
small enough for two CPU cores.  Randomly initialised: a cold start has to teach it to answer at all.
"""

from __future__ import annotations

import shutil
import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging

FAMILIES = {"qwen3": Qwen3Config, "qwen2": Qwen2Config}

SPECIAL_TOKENS = ["<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>"]
CHARACTERS = string.digits + "+-*/= " + string.ascii_letters + "\n!\"#$%&'(),.:;<>?@[\\]^_`{|}~"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of printable ASCII; anything else is <unk>.  `<eos>` ends an answer."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
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
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_tiny_model(
    folder: str | Path,
    *,
    hidden: int = 128,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    ffn: int = 384,
    seed: int = 0,
    dtype: str = "float32",
    family: str = "qwen3",
    tied: bool = True,
    max_positions: int = 2048,
) -> Path:
    """Write config, weights and tokenizer; returns the folder.  The same arguments always give the same weights.

    The folder appears complete or not at all.  Raises ValueError for an unknown family, impossible sizes, or a folder
    that already holds something.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder}: the folder is not empty; want a new one")
    tokenizer = tiny_tokenizer()
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "max_position_embeddings": max_positions,
    }
    _check_sizes(family, sizes)
    config = FAMILIES[family](
        **sizes,
        vocab_size=len(tokenizer),
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it was
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)

    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    with _quiet():
        model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.replace(folder)  # also over an empty folder
    return folder


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar for a file that is written in an instant."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_sizes(family: str, sizes: dict[str, int]) -> None:
    """Raises ValueError when the sizes cannot make a model of this family."""
    if family not in FAMILIES:
        raise ValueError(f"family={family!r}: want one of {', '.join(FAMILIES)}")
    hidden, heads, kv_heads = sizes["hidden_size"], sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if heads % kv_heads:
        raise ValueError(f"heads={heads}, kv_heads={kv_heads}: want heads to be a multiple of kv_heads")
    if family == "qwen2" and sizes["head_dim"] * heads != hidden:
        raise ValueError(
            f"head_dim={sizes['head_dim']}: want hidden / heads for qwen2, whose config has no such field; "
            f"hidden={hidden}, heads={heads}"
        )
