"""What both sides of bench_peer.py do: one model folder, one file of prompts, the same numbers; and what it costs."""

from __future__ import annotations

import json
import random
import string
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from megarl.config import load_config
from megarl.data.examples.tasks import write_task
from megarl.data.examples.tiny import write_tiny_model
from megarl.trainer.recipes.quickstart import MODEL, TASK, prepare


@dataclass(frozen=True)
class Work:
    """GRPO as recipe quickstart_grpo does it, with answers of one length."""

    folder: str
    new_tokens: int  # of every answer
    iterations: int
    warmup: int  # iterations before the clock counts
    threads: int  # cores, on either side
    prompt_tokens: int = 0  # random digits; 0: the quickstart's sums, of 6
    learns: bool = False  # the quickstart itself: its cold start and reward; the model ends its answers
    prompts: int = 64  # of an iteration
    n: int = 8  # answers to each
    epochs: int = 2  # optimizer steps of an iteration
    kl_coef: float = 0.001  # of the loss, against a frozen reference
    lr: float = 3e-4

    @property
    def model(self) -> str:
        return f"{self.folder}/runs/quickstart_sft/hf" if self.learns else f"{self.folder}/model"

    @property
    def data(self) -> str:
        return f"{self.folder}/{'runs/quickstart_data' if self.learns else 'data'}/train.jsonl"

    @property
    def tokens_per_iteration(self) -> int:
        return self.prompts * self.n * self.new_tokens

    @property
    def measured(self) -> int:
        """Tokens that are generated while the clock counts."""
        return self.tokens_per_iteration * (self.iterations - self.warmup)

    def write(self) -> None:
        """The model and the prompts."""
        if self.learns:
            with chdir(self.folder):
                prepare(load_config(["recipe=quickstart_grpo"])[0])
            return
        write_task(f"{self.folder}/data", TASK)
        if self.prompt_tokens:
            draw = random.Random(0)
            prompts = ["".join(draw.choices(string.digits, k=self.prompt_tokens)) for _ in range(4096)]
            rows = [{"prompt": prompt, "ground_truth": "", "data_source": "digits"} for prompt in prompts]
            Path(self.data).write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_tiny_model(self.model, MODEL)
        _end_nowhere(Path(self.model))

    def flops(self) -> float:
        """Of one iteration: what the mathematics needs, each prompt read once for all of its answers.

        Forward over everything for the old and the reference log-probs and, three times as much, for each optimizer
        step with its backward; the output layer only where an answer is predicted.
        """
        config = json.loads((Path(self.model) / "config.json").read_text())
        with open(self.data, encoding="utf-8") as file:
            prompt = len(json.loads(file.readline())["prompt"])  # one token a character, all prompts alike
        answers = self.prompts * self.n
        whole = answers * forward_flops(config, prompt + self.new_tokens, self.new_tokens)
        shared = (answers - self.prompts) * forward_flops(config, prompt, 0)
        return whole - shared + whole * (2 + 3 * self.epochs)


def forward_flops(config: dict[str, Any], length: int, predicted: int) -> float:
    """Of one sequence: two for each weight of a matrix and token, and causal attention's two products."""
    hidden, heads, kv, dim = (
        config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    matrices = hidden * dim * 2 * (heads + kv) + 3 * hidden * config["intermediate_size"]
    attention = 4 * heads * dim * length * (length + 1) / 2
    body = config["num_hidden_layers"] * (2 * matrices * length + attention)
    return body + 2 * hidden * config["vocab_size"] * predicted


def _end_nowhere(folder: Path) -> None:
    """Give every answer its full length: the tokenizer has no end, and the model's is behind its last token."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": vocabulary}, indent=2))
