"""A tiny model, and servers of it. Everything here runs over real HTTP on loopback.

The contract suite knows a server only as `Served`; `VARIANTS` says which there are. Those of SGLang need the
environments that launch/sglang_cpu.sh makes.  With MEGARL_TEST_DEVICE=cuda they are servers on a GPU.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from spawn import DEVICE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from megarl.io.tls import trusted
from megarl.rollout.client import ServerClient
from megarl.rollout.protocol import Route, auth_headers
from megarl.servers.launch import EngineLaunch
from megarl.servers.router import Router
from megarl.servers.sglang_environment import PYTHON_VARIABLE
from megarl.servers.supervisor import Servers

VOCAB = 32
CONTEXT = 4096
LIMIT_S = 240.0  # of what must happen, however busy the machine is
EOS = 1
TOKEN = "a token of the tests"
TRUSTED = trusted("https://127.0.0.1", TOKEN)
ALPHABET = "0123456789+-*=?abcdefghijklmno"


# Heads of 64: the smallest that attention kernels on a GPU take.
HEAD = 64 if DEVICE == "cuda" else 8
ROOT = Path(__file__).parents[2]
CURRENT, OLD = "0.5.23", "0.5.17"  # of SGLang


@dataclass(frozen=True)
class Variant:
    """One way to serve: how many servers of what, and whether completions are asked of a router before them."""

    engine: str = "hf"
    version: str = CURRENT
    servers: int = 1
    tensor_parallel_size: int = 1
    router: bool = False
    tls: str = "never"


# The old version has one rank here: a second one changes only where weights lie, and test_push_sglang.py pushes those.
# Both versions serve https, also behind the router; servers of two ranks, and those of other tests, serve http.
VARIANTS = {
    "hf": Variant(),
    "sglang": Variant("sglang", tls="always"),
    "sglang_old": Variant("sglang", OLD, tls="always"),
    "sglang_tp2": Variant("sglang", tensor_parallel_size=2),
    "sglang_smg": Variant("sglang", servers=2, router=True, tls="always"),
}
BOTH = ("hf", "sglang")  # a test of the contract runs against these, and against another one where that may differ
PARAMS = {name: pytest.param(name, id=name, marks=[] if name == "hf" else [pytest.mark.sglang]) for name in VARIANTS}


def against(*names: str) -> pytest.MarkDecorator:
    """Marks a test of the contract: it runs against these variants.  Their name comes first in ids: put it last."""
    return pytest.mark.parametrize("any_served", [PARAMS[name] for name in names], indirect=True)


class EveryEngine:
    """Orders to all servers of a variant as if they were one `Engine`; a value is that of the first."""

    def __init__(self, engines: list[ServerClient]) -> None:
        self.engines = engines

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.engines[0], name)
        if not callable(value):
            return value
        return lambda *args, **options: [getattr(engine, name)(*args, **options) for engine in self.engines][0]


@dataclass(frozen=True)
class Served:
    """Running servers: where they are, what they were started with, and a folder of other weights for the same model.

    Completions come from each url of `generate_urls` in turn, everything else from `url`, the first server.
    """

    urls: tuple[str, ...]
    generate_urls: tuple[str, ...]
    token: str
    model_path: str
    other_path: str
    engine: EveryEngine
    variant: Variant = field(default_factory=Variant)
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=LIMIT_S, trust_env=False, verify=TRUSTED))
    turns: Iterator[str] = field(default=iter(()))
    check: Callable[[], None] = lambda: None  # raises where a server has died
    checksums: dict[str, str] = field(default_factory=dict)  # of the first weights
    logs: Path = field(default_factory=Path)  # the folder of their logs

    @property
    def url(self) -> str:
        return self.urls[0]

    def ask(self, route: str, body: object = None, method: str = "POST", token: str | None = None) -> httpx.Response:
        headers = auth_headers(self.token if token is None else token)
        url = next(self.turns) if route == Route.GENERATE else self.url
        return self.http.request(method, url + route, json=body, headers=headers)

    def num_running(self) -> int:
        """Completions being written, over all servers."""
        if self.variant.engine == "hf":
            return self.engine.server_info()["internal_states"][0]["num_running_reqs"]
        return sum(load["num_running_reqs"] for load in self._loads())

    def num_tokens(self) -> int:
        """Tokens in the KV caches of SGLang's servers."""
        return sum(load["num_used_tokens"] for load in self._loads())

    def num_waiting(self) -> int:
        """Requests that SGLang's servers have not begun, or have retracted."""
        return sum(load["num_waiting_reqs"] for load in self._loads())

    def wait_until_writing(self, prompt_tokens: int, count: int = 1) -> None:
        """Servers tell nobody when they begin with a request: they are asked, every 10 ms."""
        deadline = time.monotonic() + LIMIT_S
        while self.num_running() < count:
            assert time.monotonic() < deadline, "the request never began to run"
            time.sleep(0.01)
        while self.variant.engine == "sglang" and self.num_tokens() < 2 * prompt_tokens + 8:  # it is not only read
            assert time.monotonic() < deadline, "the request writes nothing"
            time.sleep(0.01)

    def _loads(self) -> list[dict[str, Any]]:
        headers = auth_headers(self.token)
        loads = [self.http.get(f"{url}/v1/loads", headers=headers).json()["loads"] for url in self.urls]
        return [load for of_server in loads for load in of_server]


def make_model(folder: Path, seed: int, *, tied: bool = False) -> str:
    """A Qwen3 with random weights and a tokenizer of one character a token."""
    write_tokenizer(folder)
    torch.manual_seed(seed)
    Qwen3ForCausalLM(tiny_config(tie_word_embeddings=tied)).save_pretrained(folder)
    return str(folder)


def make_reward_model(folder: Path, seed: int) -> str:
    """The same with a head of one score in place of the vocabulary."""
    write_tokenizer(folder)
    torch.manual_seed(seed)
    Qwen3ForSequenceClassification(tiny_config(num_labels=1)).save_pretrained(folder)
    return str(folder)


def write_tokenizer(folder: Path) -> None:
    tokens = ["<pad>", "<eos>", *ALPHABET]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


def tiny_config(**more: Any) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=4 * HEAD,
        intermediate_size=8 * HEAD,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
        initializer_range=0.25,  # far from uniform, so that a wrong position or mask shows
        **more,
    )


def sglang_of(version: str) -> str:
    """Python of the environment with this version of SGLang; a missing one fails the test."""
    variable = PYTHON_VARIABLE if version == CURRENT else f"{PYTHON_VARIABLE}_{version.replace('.', '_')}"
    folder = ".venv-sglang" if version == CURRENT else f".venv-sglang-{version}"
    python = Path(os.environ.get(variable, ROOT / folder / "bin/python"))
    if not python.exists():
        pytest.fail(f"{python} is missing: run `bash launch/sglang_cpu.sh {version}`, or set {variable}", pytrace=False)
    return str(python)


@contextmanager
def running(variant: Variant, model_path: str, log_dir: Path) -> Iterator[Servers]:
    """Servers for this variant, ready, and gone afterwards."""
    launch = EngineLaunch(
        variant.engine,
        model_path,
        max_running_requests=64,
        max_total_tokens=64 * 1024,
        random_seed=7,
        tls=variant.tls,
        tensor_parallel_size=variant.tensor_parallel_size,
        python=sglang_of(variant.version) if variant.engine == "sglang" else None,
        device=DEVICE,
        **({"first_gpu": 0, "memory_fraction": 0.2} if DEVICE == "cuda" else {}),  # several share the only one
    )
    with Servers([launch] * variant.servers, TOKEN, log_dir) as servers:
        servers.start()
        yield servers


def _check(servers: Servers) -> None:
    assert not [str(server.process.died()) for server in servers._servers if not server.process.alive]


@contextmanager
def served_by(servers: Servers, variant: Variant, model_path: str, other_path: str, log_dir: Path) -> Iterator[Served]:
    """As many of these servers as the variant has, and its router."""
    urls = tuple(servers.urls[: variant.servers])
    engine = EveryEngine([ServerClient(url, TOKEN, timeout_s=LIMIT_S) for url in urls])
    with ExitStack() as stack:
        generate_urls = urls
        if variant.router:
            router = stack.enter_context(Router(TOKEN, log_dir / "router.log", python=sglang_of(variant.version)))
            router.start(urls)
            generate_urls = (router.url,)
        yield Served(
            urls,
            generate_urls,
            TOKEN,
            model_path,
            other_path,
            engine,
            variant,
            turns=itertools.cycle(generate_urls),
            check=lambda: _check(servers),
            checksums=engine.checksums(),
            logs=log_dir,
        )
