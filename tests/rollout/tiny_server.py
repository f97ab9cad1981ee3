"""A tiny model, and servers of it. Everything here runs over real HTTP on loopback.

The contract suite knows a server only as `Served`; another implementation is one more entry of SERVERS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from megarl.rollout.client import Engine
from megarl.rollout.launch import EngineLaunch
from megarl.rollout.protocol import auth_headers
from megarl.rollout.supervisor import Servers

VOCAB = 32
CONTEXT = 4096
EOS = 1
TOKEN = "a token of the tests"
ALPHABET = "0123456789+-*=?abcdefghijklmno"


@dataclass(frozen=True)
class Served:
    """A running server: where it is, what it was started with, and a folder of other weights for the same model."""

    url: str
    token: str
    model_path: str
    other_path: str
    engine: Engine
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60, trust_env=False))

    def ask(self, route: str, body: object = None, method: str = "POST", token: str | None = None) -> httpx.Response:
        headers = auth_headers(self.token if token is None else token)
        return self.http.request(method, self.url + route, json=body, headers=headers)


def make_model(folder: Path, seed: int, *, tied: bool = False) -> str:
    """A Qwen3 with random weights and a tokenizer of one character a token."""
    tokens = ["<pad>", "<eos>", *ALPHABET]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
        initializer_range=0.25,  # far from uniform, so that a wrong position or mask shows
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@contextmanager
def cpu_server(model_path: str, log_dir: Path) -> Iterator[tuple[str, str]]:
    launch = EngineLaunch("cpu", model_path, max_running_requests=64, max_total_tokens=64 * 1024, random_seed=7)
    with Servers([launch], TOKEN, log_dir) as servers:
        servers.start()
        yield servers.urls[0], TOKEN


SERVERS: dict[str, Callable[[str, Path], AbstractContextManager[tuple[str, str]]]] = {"cpu": cpu_server}
