"""A tiny model, and servers of it. Everything here runs over real HTTP on loopback.

The contract suite knows a server only as `Served`; another implementation is one more entry of SERVERS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
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
    tokens = ["<pad>", "<eos>", *"0123456789+-*=?abcdefghijklmno"]
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


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same architecture with other weights."""
    return make_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def tied_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("tied"), seed=2, tied=True)


@pytest.fixture(scope="session")
def reference(model_path: str) -> Qwen3ForCausalLM:
    """transformers' own forward pass over the served weights."""
    return Qwen3ForCausalLM.from_pretrained(model_path).eval()


@contextmanager
def cpu_server(model_path: str, log_dir: Path) -> Iterator[tuple[str, str]]:
    launch = EngineLaunch("cpu", model_path, max_running_requests=64, max_total_tokens=64 * 1024, random_seed=7)
    with Servers([launch], TOKEN, log_dir) as servers:
        servers.start()
        yield servers.urls[0], TOKEN


SERVERS: dict[str, Callable[[str, Path], AbstractContextManager[tuple[str, str]]]] = {"cpu": cpu_server}


@pytest.fixture(scope="session", params=sorted(SERVERS))
def shared_server(
    request: pytest.FixtureRequest, model_path: str, other_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with SERVERS[request.param](model_path, tmp_path_factory.mktemp("logs")) as (url, token):
        yield Served(url, token, model_path, other_path, Engine(url, token, timeout_s=60))


@pytest.fixture
def server(shared_server: Served) -> Iterator[Served]:
    """The shared server, handed back as it was found: running, at version 0 of the first weights, in no session."""
    yield shared_server
    shared_server.engine.abort(everything=True)
    shared_server.engine.resume()
    shared_server.engine.resume_memory()
    if shared_server.engine.model_info()["weight_version"] != "0":
        shared_server.engine.update_from_disk(shared_server.model_path, version=0)
