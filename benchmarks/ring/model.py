"""What a measured run reads in place of a user's files: a model folder and prompts, made here from a seed.

The folder of a large model has a config.json and a tokenizer and no weights: ranks keep those with which Megatron made
them, SGLang's servers begin with dummies, and the first push makes them equal.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from megarl.arch.hf_config import config_of
from megarl.arch.layout import RANDOM_WEIGHTS
from megarl.weights.count import whole

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
MOST_WRITTEN = 2 * 10**9  # parameters of a model that is written with its weights


def write_model(
    folder: Path, hf: dict[str, Any], *, dtype: str, weights: bool, response_tokens: float | None, seed: int = 0
) -> Path:
    """A folder for this config.json, whole or not at all.

    `response_tokens`: the mean length to which completions come, as far as the limit of the run lets them: with
    random weights all tokens are about equally likely, so that V / mean of them end a completion.
    """
    if weights and (size := whole(hf)) > MOST_WRITTEN:
        raise ValueError(
            f"rollout.engine=hf: it reads weights from a folder, and {size / 1e9:.0f} billion are too many to make "
            f"one for; expected rollout.engine=sglang, or a model of at most {MOST_WRITTEN / 1e9:.0f} billion"
        )
    stops = stop_ids(hf["vocab_size"], response_tokens)
    numbers = {**hf, "architectures": [ARCHITECTURES[hf["model_type"]]], "torch_dtype": dtype}
    numbers |= {"eos_token_id": stops, "pad_token_id": 0, "bos_token_id": None}
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    if weights:
        _write_weights(unfinished, hf, dtype, seed)
    else:
        numbers[RANDOM_WEIGHTS] = True
    (unfinished / "config.json").write_text(json.dumps(numbers, indent=2))
    (unfinished / "generation_config.json").write_text(json.dumps({"eos_token_id": stops, "pad_token_id": 0}))
    word_tokenizer(hf["vocab_size"], stops[0]).save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.replace(folder)
    return folder


def stop_ids(vocab_size: int, response_tokens: float | None) -> list[int]:
    """The last tokens of the vocabulary, as many as it takes; None: one."""
    count = 1 if response_tokens is None else round(vocab_size / response_tokens)
    return list(range(vocab_size - max(1, min(count, vocab_size // 2)), vocab_size))


def word_tokenizer(vocab_size: int, eos: int) -> PreTrainedTokenizerFast:
    """One token a word: "t0", "t1", ..., with white space between them."""
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="t0",
        pad_token="t0",
        eos_token=f"t{eos}",
        clean_up_tokenization_spaces=False,
    )


def write_prompts(file: Path, count: int, *, mean: float, longest: int, vocab_size: int, seed: int = 0) -> float:
    """Rows of random words, lengths even between half the mean and once and a half, as far as `longest` lets them.

    Returns the mean of the lengths that they have.
    """
    draw, half = random.Random(seed), vocab_size // 2  # the other half may be tokens that end a completion
    lengths = [max(1, min(longest, round(draw.uniform(0.5, 1.5) * mean))) for _ in range(count)]
    rows = [" ".join(f"t{draw.randrange(1, half)}" for _ in range(length)) for length in lengths]
    file.write_text("".join(json.dumps({"prompt": row, "ground_truth": ""}) + "\n" for row in rows))
    return sum(lengths) / count


def _write_weights(folder: Path, hf: dict[str, Any], dtype: str, seed: int) -> None:
    config = config_of(hf)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    if shown:
        logging.enable_progress_bar()
